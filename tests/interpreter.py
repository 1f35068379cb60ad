"""Runs tests that need Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

unless_interpreted = pytest.mark.skipif(IS_INTERPRETED, reason="this process runs them itself")


def run_interpreted(folder: str, which: str) -> None:
    """Run the tests under ``folder`` in a separate process, and fail as they do.

    Args:
        folder: relative to the project's root.
        which: a marker expression.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-m", which]
    done = subprocess.run(
        [*command, folder],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def patch_device_functions_once() -> None:
    """Save the interpreter a third of its time.

    It patches its own functions into ``triton.language`` when a kernel starts, and at each call of
    a device function looks for more to patch. It finds something only at the first call of a
    function, in the module through which that function sees the language, and the patch stays.
    """
    if not IS_INTERPRETED:
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    run = interpreter.InterpretedFunction.__call__
    ready: set[Any] = set()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function in ready:
            return function.rewrite()(*args, **kwargs)
        ready.add(function)
        return run(function, *args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call

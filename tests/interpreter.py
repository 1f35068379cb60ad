"""Tests that need Triton's interpreter, which a process chooses once, before it imports Triton."""

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
    """Run the tests under ``folder`` in a process of their own; fail as they do.

    Args:
        folder: from the project's root.
        which: an expression of markers.
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
    """Spare the interpreter a third of its time.

    It puts its own functions into ``triton.language`` when a kernel starts, and at each call of a
    device function looks for what is left to be replaced. That is something at a function's first
    call alone, in the module that it sees the language by, and stays.
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

"""Tests that need Triton's interpreter, which a process chooses once, before it imports Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

unless_interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="this process runs them itself"
)


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

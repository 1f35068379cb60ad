"""Runs the tests under ``dry`` in a process that has chosen Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="runs them itself")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_engine_keeps_the_rules_of_a_gpu(which: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-m", which]
    done = subprocess.run(
        [*command, "tests/pretended_gpu/dry"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

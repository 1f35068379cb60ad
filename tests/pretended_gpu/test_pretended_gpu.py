"""Runs the tests under ``dry`` in a process that has chosen Triton's interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.interpreter import run_interpreted, unless_interpreted

pytest.importorskip("triton")


@unless_interpreted
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_engine_keeps_the_rules_of_a_gpu(which: str) -> None:
    run_interpreted("tests/pretended_gpu/dry", which)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
def test_kernels_are_compiled_ahead(tmp_path: Path) -> None:
    """In files that Triton finds again."""
    command = [sys.executable, "-m", "tests.pretended_gpu.ahead", str(tmp_path / "cache")]
    command += ["--models", "", "--kernels", "inputs 256"]
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    times = []
    for _ in range(2):
        subprocess.run(command, cwd=Path(__file__).parents[2], env=env, check=True, timeout=300)
        (kernel,) = (tmp_path / "cache").glob("*/_build_inputs_kernel.cubin")
        times.append(kernel.stat().st_mtime_ns)
    assert times[0] == times[1]

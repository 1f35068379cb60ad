"""Runs the tests under ``dry`` in a process that has chosen Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.interpreter import run_interpreted, unless_interpreted

pytest.importorskip("triton")


@unless_interpreted
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_engine_keeps_the_rules_of_a_gpu(which: str) -> None:
    run_interpreted("tests/pretended_gpu/dry", which)

"""Runs the tests under ``interpreted`` in a process that has chosen Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.interpreter import run_interpreted, unless_interpreted

pytest.importorskip("triton")


@unless_interpreted
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_equal_the_reference_in_the_interpreter(which: str) -> None:
    run_interpreted("tests/kernels/triton_kernels/interpreted", which)

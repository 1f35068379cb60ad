"""Emulates a GPU's matrix units in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rows of ``tl.dot`` independent of their place in a tile, and of its depth, bit for bit.

    This holds on a matrix unit, which accumulates 16 inputs at a time. The interpreter multiplies
    with NumPy, whose library computes a row differently depending on its place and on the
    processor.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(builder, a, b, d, input_precision, max_num_imprecise_acc) -> TensorHandle:
        total = d.data
        for begin in range(0, a.data.shape[-1], 16):
            parts = a.data[..., begin : begin + 16], b.data[..., begin : begin + 16, :]
            total = np.einsum("...ij,...jk->...ik", *parts, dtype=total.dtype) + total
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)

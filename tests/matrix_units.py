"""What stands in for a GPU's matrix units."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a ``tl.dot`` have the same bits wherever in a tile they lie, and however deep it is,
    as on a matrix unit, which adds up 16 inputs at a time.

    The interpreter multiplies by NumPy, whose library computes a row as its place among the others
    and the processor suggest.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(builder, a, b, d, input_precision, max_num_imprecise_acc) -> TensorHandle:
        total = d.data
        for begin in range(0, a.data.shape[-1], 16):
            parts = a.data[..., begin : begin + 16], b.data[..., begin : begin + 16, :]
            total = np.einsum("...ij,...jk->...ik", *parts, dtype=total.dtype) + total
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)

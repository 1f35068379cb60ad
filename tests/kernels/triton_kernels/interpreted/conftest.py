"""What stands in for a GPU's matrix units."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a ``tl.dot`` have the same bits wherever in a tile they lie, as on a matrix unit.

    The interpreter multiplies by NumPy, whose library computes a row as its place among the others
    and the processor suggest.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(builder, a, b, d, input_precision, max_num_imprecise_acc) -> TensorHandle:
        product = np.einsum("...ij,...jk->...ik", a.data, b.data, dtype=d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)

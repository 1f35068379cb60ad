"""The order in which Triton's interpreter runs the programs of a kernel."""

from __future__ import annotations

import pytest
from triton.runtime import interpreter


def run_last_programs_first(patch: pytest.MonkeyPatch) -> None:
    """Reverse the order, which no GPU promises: a program that reads what an earlier one of its
    kernel writes finds nothing."""
    builder = interpreter.interpreter_builder
    set_index = builder.set_grid_idx

    def set_reversed(*index: int) -> None:
        set_index(*(size - 1 - at for size, at in zip(builder.grid_dim, index, strict=True)))

    patch.setattr(builder, "set_grid_idx", set_reversed)

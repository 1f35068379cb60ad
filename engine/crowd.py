"""How many sequences keep both the engine and the process that speaks HTTP busy."""

from __future__ import annotations

# Sequences of a small model whose tokens leave the process that speaks HTTP next to nothing to do.
_FEW = 4
# And those whose step takes longer than it does to tell of its tokens.
_MANY = 48


def is_crowd(num_rows: int) -> bool:
    """Whether the tokens of so many sequences are told beside the next step, in about its time."""
    return _FEW < num_rows < _MANY


def are_many(num_rows: int) -> bool:
    """Whether there are more of them than a crowd."""
    return num_rows >= _MANY

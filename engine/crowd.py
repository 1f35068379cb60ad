"""The numbers of sequences at which both the engine and the API process are busy."""

from __future__ import annotations

# With this many sequences of a small model, their output leaves the API process almost idle.
_FEW = 4
# From this many on, a step takes longer than delivering its tokens.
_MANY = 48


def is_crowd(num_rows: int) -> bool:
    """Whether delivering the tokens of so many sequences takes about as long as their next step."""
    return _FEW < num_rows < _MANY


def are_many(num_rows: int) -> bool:
    """Whether there are more sequences than in a crowd."""
    return num_rows >= _MANY

"""The numbers of sequences at which both the engine and the API process are busy."""

from __future__ import annotations

# With this many sequences of a small model, their output leaves the API process almost idle.
_SMALL_BATCH = 4
# From this many on, a step takes longer than delivering its tokens.
_LARGE_BATCH = 48


def is_contended(num_rows: int) -> bool:
    """Whether delivering the tokens of so many sequences takes about as long as their next step."""
    return _SMALL_BATCH < num_rows < _LARGE_BATCH


def is_large_batch(num_rows: int) -> bool:
    """Whether a step of so many sequences takes longer than delivering their tokens.

    So does one of as many tokens, whichever sequences they are of.
    """
    return num_rows >= _LARGE_BATCH

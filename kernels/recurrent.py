"""Data types of recurrent layers.

A row's state is at the row's slot (``StepRows.slots``) in tensors whose first dimension is lines; a
step reads it there and overwrites it in place. The start of a row determines its state:

- 0: it begins with a zero state, whatever the line holds.
- -1: it is padding of a captured batch. It begins with zeros and changes no state, and its output
  is meaningless. Such rows may be without tokens.
- ``~p``, where its first token's position is p > 0: it is on trial, so that it is not known yet how
  many tokens will be kept. It begins with the state of the line, and does not change it.
"""

from __future__ import annotations

from typing import NamedTuple

# Prompt tokens that are applied to a state together, in kernels that do not apply them one by one.
CHUNK = 64
MIN_CHUNKED_TOKENS = 16  # minimum tokens of a row that is cut into chunks


class GatedDeltaShape(NamedTuple):
    """The shape of a gated delta rule layer."""

    key_heads: int
    value_heads: int  # a multiple of key_heads; adjacent ones share a key head
    key_dim: int  # of a head
    value_dim: int  # of a head
    allows_negative: bool = False  # beta up to 2, for eigenvalues down to -1
    decays_channels: bool = False  # each line of a state has a decay of its own
    # Below 0: the logarithms of decays are sigmoids, times this. 0: they have no bound.
    least_log_decay: float = 0.0

    @property
    def num_decays(self) -> int:
        """Number of decays of a value head."""
        return self.key_dim if self.decays_channels else 1

    @property
    def channels(self) -> int:
        """Width of a token's concatenated queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class ScanShape(NamedTuple):
    """The shape of a selective state space layer (Mamba-2)."""

    heads: int
    groups: int  # a divisor of heads; the adjacent heads of a group share B and C
    head_dim: int
    state_size: int  # per channel
    time_step_limit: tuple[float, float] = (0.0, float("inf"))

    @property
    def channels(self) -> int:
        """Width of a token's concatenated x, B and C."""
        return self.heads * self.head_dim + 2 * self.groups * self.state_size


def max_chunks(num_tokens: int, num_rows: int, longest: int | None = None) -> int:
    """Return an upper bound of the number of chunks; 0 if no row can be cut into any.

    That is known of rows with a single token each, and where the ``longest`` row is known.
    Otherwise it is at least one, so that the first prompt compiles the kernels, however short it
    is.
    """
    if num_tokens == num_rows or (longest is not None and longest < MIN_CHUNKED_TOKENS):
        return 0
    return num_tokens // CHUNK + max(1, min(num_rows, num_tokens // MIN_CHUNKED_TOKENS))

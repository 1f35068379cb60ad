"""The nouns of layers that carry a state from token to token.

A row's state lies at the row's slot (``StepRows.slots``) in tensors whose first dimension is those
lines; a step reads it there and overwrites it in place. A row that starts at 0 begins with a zero
state, whatever lies there. A row that starts at -1 pads a captured batch: it begins with zeros too,
leaves every state alone, and what comes out of it means nothing. A row on trial, of which it is yet
to be seen how many tokens stay, has ``~p`` as its start where its first token's position is p > 0:
it begins with the state that lies there, and leaves that as it is. Rows that pad may be without
tokens.
"""

from __future__ import annotations

from typing import NamedTuple

# Tokens of a prompt that meet a state together, in kernels where they do not meet it one by one.
CHUNK = 64


class GatedDeltaShape(NamedTuple):
    """A layer of the gated delta rule."""

    key_heads: int
    value_heads: int  # a multiple of key_heads; neighbours share a key head
    key_dim: int  # of a head
    value_dim: int  # of a head
    allows_negative: bool = False  # beta up to 2, for eigenvalues down to -1

    @property
    def channels(self) -> int:
        """Queries, keys and values of a token side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class ScanShape(NamedTuple):
    """A layer of a selective state space (Mamba-2)."""

    heads: int
    groups: int  # a divisor of heads; neighbouring heads share B and C
    head_dim: int
    state_size: int  # of each channel
    time_step_limit: tuple[float, float] = (0.0, float("inf"))

    @property
    def channels(self) -> int:
        """x, B and C of a token side by side."""
        return self.heads * self.head_dim + 2 * self.groups * self.state_size

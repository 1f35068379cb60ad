"""What stands in place of attention in some layers, apart from its weights. Standard library only.

Each keeps a state for a sequence, of a fixed size however long the text: the last inputs of a short
convolution, and sums over all tokens where there are any (``engine/models/recurrent.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class GatedDeltaSpec:
    """The gated delta rule behind a short convolution (Yang et al. 2024).

    A key head serves ``num_value_heads / num_key_heads`` value heads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int  # of a head
    width: int  # of the convolution: a token and those before it that it sees
    norm_eps: float  # of the norm behind it
    allows_negative: bool = False  # eigenvalues of what a token does to the state
    apart: bool = False  # the checkpoint has queries, keys, values and gates each by themselves

    @property
    def mixed_sizes(self) -> tuple[int, int, int]:
        """Widths of all queries, keys and values."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.value_size

    @property
    def value_size(self) -> int:
        """Width of all value heads together."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """That the convolution goes over."""
        return sum(self.mixed_sizes)

    @property
    def sums_shape(self) -> tuple[int, ...] | None:
        """Of a sequence's sums over all its tokens, in float32."""
        return self.num_value_heads, self.key_dim, self.value_dim

    @property
    def fed_size(self) -> int:
        """Numbers that a layer holds of a token on trial: what it is projected to."""
        return self.channels + self.value_size + 2 * self.num_value_heads


@dataclass(frozen=True)
class ShortConvSpec:
    """A gated convolution over the last few tokens, for each channel by itself (LFM2)."""

    channels: int
    width: int  # a token and those before it that it sees
    bias: bool = False  # of the convolution and of both projections

    @property
    def sums_shape(self) -> tuple[int, ...] | None:
        """There are none."""
        return None

    @property
    def fed_size(self) -> int:
        """Numbers that a layer holds of a token on trial: what it is projected to."""
        return 3 * self.channels


@dataclass(frozen=True)
class MambaSpec:
    """The selective state space of Mamba-2 behind a short convolution (Dao & Gu 2024).

    Heads of a group, neighbours, share what writes to and reads from their states.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    state_size: int  # of each of a head's channels
    width: int  # of the convolution: a token and those before it that it sees
    norm_eps: float  # of the norm behind it, over a group's heads together
    conv_bias: bool = True
    bias: bool = False  # of both projections
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    divides_group: bool = False  # of the only group's heads a rank has a part
    has_norm: bool = True  # False: what comes out is gated and not normed
    # What config.json calls both counts, for who is told that they do not do.
    heads_key: str = "mamba_n_heads"
    groups_key: str = "mamba_n_groups"

    @property
    def inner_size(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def mixed_sizes(self) -> tuple[int, int, int]:
        """Widths of what is written to states and, of all groups, of what writes and reads it."""
        shared = self.num_groups * self.state_size
        return self.inner_size, shared, shared

    @property
    def channels(self) -> int:
        """That the convolution goes over."""
        return sum(self.mixed_sizes)

    @property
    def projected_size(self) -> int:
        """Width of what a token is projected to: gates, channels, and a time step for each head."""
        return self.inner_size + self.channels + self.num_heads

    @property
    def sums_shape(self) -> tuple[int, ...] | None:
        """Of a sequence's sums over all its tokens, in float32."""
        return self.num_heads, self.state_size, self.head_dim

    @property
    def fed_size(self) -> int:
        """Numbers that a layer holds of a token on trial: what it is projected to."""
        return self.projected_size


RecurrenceSpec = GatedDeltaSpec | ShortConvSpec | MambaSpec

_SUM_BYTES = 4


def layer_state_bytes(spec: RecurrenceSpec, itemsize: int) -> int:
    """What a sequence's state takes in one layer; ``itemsize`` is of the model's dtype."""
    inputs = (spec.width - 1) * spec.channels * itemsize
    return inputs + (0 if spec.sums_shape is None else math.prod(spec.sums_shape) * _SUM_BYTES)

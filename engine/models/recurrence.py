"""Recurrences that replace attention in some layers, without their weights. Standard library only.

Each keeps a state per sequence whose size does not depend on the text's length: the last inputs of
a short convolution and, in most, sums over all tokens (``engine/models/recurrent.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GatedDeltaSpec:
    """The gated delta rule after a short convolution (Yang et al. 2024).

    Each key head serves ``num_value_heads / num_key_heads`` value heads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int  # of a head
    conv_width: int  # of the convolution's window, the current token included
    norm_eps: float  # of the norm after it
    allow_neg_eigval: bool = False  # eigenvalues of the state transition
    separate_projections: bool = False  # queries, keys, values, gates are separate tensors
    # Each key channel has a decay of its own, and output gates are sigmoids (Kimi Delta Attention);
    # False: a head has one decay.
    decays_channels: bool = False
    channel_rank: int = 0  # that both are made from; 0: they are made directly
    least_log_decay: float = 0.0  # see ``GatedDeltaShape``

    @property
    def conv_sizes(self) -> tuple[int, int, int]:
        """Widths of all queries, keys and values."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.value_size

    @property
    def value_size(self) -> int:
        """Width of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        return sum(self.conv_sizes)

    @property
    def ssm_state_shape(self) -> tuple[int, ...] | None:
        """Shape of a sequence's sums over all its tokens, in float32."""
        return self.num_value_heads, self.key_dim, self.value_dim

    @property
    def trial_size(self) -> int:
        """Numbers that a layer holds per token on trial: its projection."""
        decays = self.num_value_heads * (self.key_dim if self.decays_channels else 1)
        gates = 0 if self.channel_rank else self.value_size
        return self.channels + gates + self.num_value_heads + decays


@dataclass(frozen=True)
class ShortConvSpec:
    """A gated depthwise convolution over the last few tokens (LFM2)."""

    channels: int
    conv_width: int  # of the window, the current token included
    bias: bool = False  # of the convolution and both projections

    @property
    def ssm_state_shape(self) -> tuple[int, ...] | None:
        """None: there are no sums."""
        return None

    @property
    def trial_size(self) -> int:
        """Numbers that a layer holds per token on trial: its projection."""
        return 3 * self.channels


@dataclass(frozen=True)
class MambaSpec:
    """The selective state space of Mamba-2 after a short convolution (Dao & Gu 2024).

    The heads of a group are adjacent and share the projections that write and read their states.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    state_size: int  # per channel of a head
    conv_width: int  # of the convolution's window, the current token included
    norm_eps: float  # of the norm after it, over each group's heads
    conv_bias: bool = True
    bias: bool = False  # of both projections
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    is_group_sharded: bool = False  # the rank has a part of a single group's heads
    has_norm: bool = True  # False: the output is gated without a norm
    # The config.json names of both counts, for error messages.
    heads_key: str = "mamba_n_heads"
    groups_key: str = "mamba_n_groups"

    @property
    def inner_size(self) -> int:
        """Width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_sizes(self) -> tuple[int, int, int]:
        """Widths of the state's inputs and, over all groups, of the projections that write and
        read it."""
        shared = self.num_groups * self.state_size
        return self.inner_size, shared, shared

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        return sum(self.conv_sizes)

    @property
    def projected_size(self) -> int:
        """Width of a token's projection: gates, channels, and a time step for each head."""
        return self.inner_size + self.channels + self.num_heads

    @property
    def ssm_state_shape(self) -> tuple[int, ...] | None:
        """Shape of a sequence's sums over all its tokens, in float32."""
        return self.num_heads, self.state_size, self.head_dim

    @property
    def trial_size(self) -> int:
        """Numbers that a layer holds per token on trial: its projection."""
        return self.projected_size


@dataclass(frozen=True)
class ChannelScanSpec:
    """The selective state space of Mamba-1 after a short convolution (Gu & Dao 2023).

    Each channel has decay rates of its own; time steps are made from a low rank.
    """

    channels: int
    state_size: int  # per channel
    step_rank: int
    conv_width: int  # of the convolution's window, the current token included
    conv_bias: bool = True
    bias: bool = False  # of the first and the last projection
    # RMS norms of time steps before their projection, and of what writes and reads the state.
    norms: Literal["none", "weightless", "learned"] = "none"
    norm_eps: float = 1e-6
    width_key: str = "expand * hidden_size"  # of the channels, in config.json

    @property
    def shared_size(self) -> int:
        """Width of what all channels make together: time steps, and what writes and reads."""
        return self.step_rank + 2 * self.state_size

    @property
    def ssm_state_shape(self) -> tuple[int, ...] | None:
        """Shape of a sequence's sums over all its tokens, in float32."""
        return self.state_size, self.channels

    @property
    def trial_size(self) -> int:
        """Numbers that a layer holds per token on trial: the convolution's input."""
        return self.channels


RecurrenceSpec = GatedDeltaSpec | ShortConvSpec | MambaSpec | ChannelScanSpec

_SUM_BYTES = 4


def layer_state_bytes(spec: RecurrenceSpec, itemsize: int) -> int:
    """Return a sequence's state size in one layer, in bytes; ``itemsize`` is the model's
    dtype's."""
    inputs = (spec.conv_width - 1) * spec.channels * itemsize
    return inputs + (
        0 if spec.ssm_state_shape is None else math.prod(spec.ssm_state_shape) * _SUM_BYTES
    )

"""Mamba-1's layer (Gu & Dao 2023), a selective state space for each channel.

    x ─► input ─┬─► short convolution ─┬───────────────────────────► scan ─► gate ─► output
                │                      └─► shared ─► time steps, B, C ──┘      │
                └──────────────────────── gate ────────────────────────────────┘

Time steps are expanded from a low rank; Falcon-Mamba and Jamba norm them before, and B and C.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

from engine.models.adapters import project
from engine.models.layer_state import LayerMemory, LayerState, run_recurrence, weight_bytes
from engine.models.linear import Linear, LinearMethod
from engine.models.loader import load_matrix
from engine.models.peers import Peers
from engine.models.recurrence import ChannelScanSpec
from engine.models.step_state import StepState
from kernels.inputs import StepRows
from kernels.operations import Operations


class ChannelScanWeights(NamedTuple):
    """The loaded weights of a layer."""

    input: Linear  # to the convolution's input, and gates
    conv: torch.Tensor  # [width, channels]
    conv_bias: torch.Tensor | None  # [channels]
    shared: Linear  # to time steps of the low rank, and what writes and reads the state
    steps: Linear  # from the low rank to each channel's time step
    step_bias: torch.Tensor  # [channels]
    rates: torch.Tensor  # [state_size, channels] float32, of the states' decay
    skip: torch.Tensor  # [channels] float32
    step_norm: torch.Tensor | None  # [step_rank]
    write_norm: torch.Tensor | None  # [state_size]
    read_norm: torch.Tensor | None  # [state_size]
    output: Linear

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        return weight_bytes(self)


def make_channel_scan(
    weights: Mapping[str, torch.Tensor], method: LinearMethod, prefix: str
) -> ChannelScanWeights:
    """Make the weights of the layer whose parameters begin with ``prefix``, and take these over."""

    def linear(name: str) -> Linear:
        return method.make(
            load_matrix(weights, f"{prefix}{name}.weight"), weights.get(f"{prefix}{name}.bias")
        )

    return ChannelScanWeights(
        input=linear("input"),
        conv=weights[f"{prefix}conv.weight"].t().contiguous(),
        conv_bias=weights.get(f"{prefix}conv.bias"),
        # Few weights, but they determine how long the state remembers.
        shared=method.make_unquantized(weights[f"{prefix}shared.weight"]),
        steps=method.make_unquantized(weights[f"{prefix}steps.weight"]),
        step_bias=weights[f"{prefix}steps.bias"],
        rates=-weights[f"{prefix}log_a"].exp_().t().contiguous(),
        skip=weights[f"{prefix}skip"],
        step_norm=weights.get(f"{prefix}step_norm"),
        write_norm=weights.get(f"{prefix}write_norm"),
        read_norm=weights.get(f"{prefix}read_norm"),
        output=linear("output"),
    )


class ChannelScan:
    """Mamba-1's selective state space; see ``engine.models.block.Mixer``."""

    def __init__(
        self,
        spec: ChannelScanSpec,
        weights: ChannelScanWeights,
        operations: Operations,
        index: int,
        peers: Peers | None,
    ) -> None:
        self._weights = weights
        self._channels, self._eps = spec.channels, spec.norm_eps
        self._sizes = spec.step_rank, spec.state_size, spec.state_size
        self._operations, self._peers = operations, peers
        self._input_name = f"{index}.recurrent.input.weight"
        self.output, self.output_name = weights.output, f"{index}.recurrent.output.weight"

    def __call__(self, read: torch.Tensor, state: StepState, cache: LayerMemory) -> torch.Tensor:
        """See ``Mixer``."""
        fused = project(self._weights.input, read, state.adapters, self._input_name)
        mixed, gate = fused[:, : self._channels], fused[:, self._channels :]
        y = run_recurrence(state, partial(self._update_state, cache), mixed)
        return self._operations.apply_gate(y, gate, "silu")

    def _update_state(
        self, cache: LayerMemory, mixed: torch.Tensor, rows: StepRows
    ) -> torch.Tensor:
        """Feed tokens to the state; return its outputs for them, [n, channels]."""
        assert isinstance(cache, LayerState)
        assert cache.ssm_state is not None
        w, do = self._weights, self._operations
        x = do.short_conv(mixed, w.conv, w.conv_bias, cache.conv_state, rows, True)
        shared = w.shared(x)
        if self._peers is not None:  # each rank has read its own channels
            shared = self._peers.all_reduce(shared)
        parts = shared.split(self._sizes, dim=1)
        norms = w.step_norm, w.write_norm, w.read_norm
        ranked, write, out_of = (
            part if norm is None else do.rms_norm(part, norm, self._eps)
            for part, norm in zip(parts, norms, strict=True)
        )
        steps = w.steps(ranked.contiguous()).add_(w.step_bias)
        return do.channel_scan(x, steps, write, out_of, w.rates, w.skip, cache.ssm_state, rows)

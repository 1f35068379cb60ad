"""Layers with a recurrent state per sequence instead of keys and values.

    x ─► projection ─┬─► short convolution ─► gated delta rule ─► norm ─┬─► output
                     └──────────────────── gate ────────────────────────┘

is Qwen3-Next's layer (gated delta networks, Yang et al. 2024). Granite 4 has a selective state
space instead of the rule (Mamba-2, Dao & Gu 2024); LFM2 has only a convolution between two gates;
``channel_scan.py`` has Mamba-1's layer.

The state is on the device, one line for each slot of the runner's ``RowTable``. A step reads and
overwrites it in place (``kernels/recurrent.py``), so a token cannot be undone: drafts are fed to
the state only after their verification (``trial.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional

from engine.models.adapters import project
from engine.models.channel_scan import ChannelScan, ChannelScanWeights, make_channel_scan
from engine.models.layer_state import LayerMemory, LayerState, run_recurrence, weight_bytes
from engine.models.linear import Linear, LinearMethod
from engine.models.loader import load_matrix
from engine.models.norms import ShardedRmsNorm
from engine.models.peers import Peers
from engine.models.recurrence import (
    ChannelScanSpec,
    GatedDeltaSpec,
    MambaSpec,
    RecurrenceSpec,
    ShortConvSpec,
)
from engine.models.spec import DecoderSpec
from engine.models.step_state import StepState
from kernels.inputs import StepRows
from kernels.operations import Operations
from kernels.recurrent import GatedDeltaShape, ScanShape


class GatedDeltaWeights(NamedTuple):
    """The loaded weights of a layer with the gated delta rule."""

    input: Linear  # to queries, keys, values and output gates
    gates: Linear  # to a beta and an alpha per value head
    conv: torch.Tensor  # [width, channels]
    log_a: torch.Tensor  # [value heads] float32
    dt_bias: torch.Tensor  # [value heads] float32
    norm: torch.Tensor  # [value_dim]
    output: Linear
    # To a low rank, and from it to the alphas of key channels and to output gates; ``input`` and
    # ``gates`` have none of these then.
    ranked: Linear | None = None
    decays: Linear | None = None
    output_gates: Linear | None = None

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        return weight_bytes(self)


class ShortConvWeights(NamedTuple):
    """The loaded weights of a layer with a gated convolution."""

    input: Linear  # to the gates around it, and its input
    conv: torch.Tensor  # [width, channels]
    bias: torch.Tensor | None  # [channels]
    output: Linear

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        return weight_bytes(self)


class MambaWeights(NamedTuple):
    """The loaded weights of a layer with a selective state space."""

    input: Linear  # to gates, the convolution's input, and time steps
    conv: torch.Tensor  # [width, channels]
    conv_bias: torch.Tensor | None  # [channels]
    log_a: torch.Tensor  # [heads] float32
    dt_bias: torch.Tensor  # [heads] float32
    skip: torch.Tensor  # [heads] float32
    norm: torch.Tensor | None  # [groups, inner size / groups]
    output: Linear

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        return weight_bytes(self)


RecurrentWeights = GatedDeltaWeights | ShortConvWeights | MambaWeights | ChannelScanWeights


def make_recurrent(
    spec: RecurrenceSpec, weights: Mapping[str, torch.Tensor], method: LinearMethod, i: int
) -> RecurrentWeights:
    """Make the weights of layer ``i``, which take ownership of the parameters."""
    prefix = f"{i}.recurrent."
    if isinstance(spec, ChannelScanSpec):
        return make_channel_scan(weights, method, prefix)

    def linear(name: str) -> Linear:
        weight, bias = f"{prefix}{name}.weight", f"{prefix}{name}.bias"
        return method.make(load_matrix(weights, weight), weights.get(bias))

    def small(name: str) -> Linear | None:
        weight = weights.get(f"{prefix}{name}.weight")
        return None if weight is None else method.make_unquantized(weight)

    conv = weights[f"{prefix}conv.weight"].t().contiguous()
    if isinstance(spec, ShortConvSpec):
        bias = weights.get(f"{prefix}conv.bias")
        return ShortConvWeights(linear("input"), conv, bias, linear("output"))
    if isinstance(spec, MambaSpec):
        return MambaWeights(
            input=linear("input"),
            conv=conv,
            conv_bias=weights.get(f"{prefix}conv.bias"),
            log_a=weights[f"{prefix}log_a"],
            dt_bias=weights[f"{prefix}dt_bias"],
            skip=weights[f"{prefix}skip"],
            norm=_group_norm(spec, weights.get(f"{prefix}norm")),
            output=linear("output"),
        )
    return GatedDeltaWeights(
        input=linear("input"),
        # Few weights, like a router's, but they determine how long the state remembers.
        gates=method.make_unquantized(weights[f"{prefix}gates.weight"]),
        conv=conv,
        log_a=weights[f"{prefix}log_a"],
        dt_bias=weights[f"{prefix}dt_bias"],
        norm=weights[f"{prefix}norm"],
        output=linear("output"),
        ranked=small("ranked"),
        decays=small("decays"),
        output_gates=small("output_gates"),
    )


class GatedDelta:
    """The gated delta rule; see ``engine.models.block.Mixer``."""

    def __init__(
        self, spec: GatedDeltaSpec, weights: GatedDeltaWeights, operations: Operations, index: int
    ) -> None:
        self._weights = weights
        self._channels, self._eps = spec.channels, spec.norm_eps
        self._shape = GatedDeltaShape(
            spec.num_key_heads,
            spec.num_value_heads,
            spec.key_dim,
            spec.value_dim,
            spec.allow_neg_eigval,
            spec.decays_channels,
            spec.least_log_decay,
        )
        self._has_sigmoids = spec.decays_channels
        self._operations = operations
        self._input_name = f"{index}.recurrent.input.weight"
        self.output, self.output_name = weights.output, f"{index}.recurrent.output.weight"

    def __call__(self, read: torch.Tensor, state: StepState, cache: LayerMemory) -> torch.Tensor:
        """See ``Mixer``."""
        weights = self._weights
        fused = project(weights.input, read, state.adapters, self._input_name)
        update = partial(self._update_state, cache)
        if weights.ranked is not None:
            return self._run_ranked(fused, read, state, update)
        mixed, gate = fused[:, : self._channels], fused[:, self._channels :]
        y = run_recurrence(state, update, mixed, weights.gates(read))
        if self._has_sigmoids:
            return self._norm_and_gate(y, gate)
        return self._operations.gated_rms_norm(y, gate, weights.norm, self._eps, False)

    def _run_ranked(
        self,
        mixed: torch.Tensor,
        read: torch.Tensor,
        state: StepState,
        update: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """The rest of the layer where decays and output gates are made from a low rank."""
        w = self._weights
        assert w.ranked is not None
        assert w.decays is not None
        assert w.output_gates is not None
        for_decays, for_gates = (part.contiguous() for part in w.ranked(read).chunk(2, dim=1))
        gates = torch.cat((w.gates(read), w.decays(for_decays)), dim=1)
        y = run_recurrence(state, update, mixed, gates)
        return self._norm_and_gate(y, w.output_gates(for_gates))

    def _norm_and_gate(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Norm each head of [n, value heads, value_dim], times the sigmoids of its gates."""
        do = self._operations
        normed = do.rms_norm(y.view(-1, y.shape[-1]), self._weights.norm, self._eps)
        return do.apply_gate(normed.view(len(y), -1), gate, "sigmoid")

    def _update_state(
        self, cache: LayerMemory, mixed: torch.Tensor, gates: torch.Tensor, rows: StepRows
    ) -> torch.Tensor:
        """Feed tokens to the state; return its outputs for them, [n, value heads, value_dim]."""
        assert isinstance(cache, LayerState)
        assert cache.ssm_state is not None
        w, do = self._weights, self._operations
        mixed = do.short_conv(mixed, w.conv, None, cache.conv_state, rows, True)
        return do.gated_delta(mixed, gates, w.log_a, w.dt_bias, cache.ssm_state, rows, self._shape)


class Mamba:
    """A selective state space; see ``engine.models.block.Mixer``."""

    def __init__(
        self,
        spec: MambaSpec,
        weights: MambaWeights,
        operations: Operations,
        index: int,
        peers: Peers | None,
    ) -> None:
        self._weights = weights
        self._sizes = spec.inner_size, spec.channels, spec.num_heads
        self._groups, self._eps = spec.num_groups, spec.norm_eps
        self._shape = ScanShape(
            spec.num_heads,
            spec.num_groups,
            spec.head_dim,
            spec.state_size,
            spec.time_step_limit,
        )
        self._operations = operations
        self._sharded_norm: ShardedRmsNorm | None = None
        if spec.is_group_sharded and spec.has_norm:
            assert peers is not None
            assert weights.norm is not None
            self._sharded_norm = ShardedRmsNorm(weights.norm[0], spec.norm_eps, peers)
        self._input_name = f"{index}.recurrent.input.weight"
        self.output, self.output_name = weights.output, f"{index}.recurrent.output.weight"

    def __call__(self, read: torch.Tensor, state: StepState, cache: LayerMemory) -> torch.Tensor:
        """See ``Mixer``."""
        w = self._weights
        fused = project(w.input, read, state.adapters, self._input_name)
        gate, mixed, steps = fused.split(self._sizes, dim=1)
        y = run_recurrence(state, partial(self._update_state, cache), mixed, steps)
        if w.norm is None:
            return self._operations.silu_mul(torch.cat((gate, y.view(gate.shape)), dim=1))
        if self._sharded_norm is not None:
            gated = y.view(gate.shape).float() * functional.silu(gate.float())
            return self._sharded_norm(gated).to(y.dtype)
        y = y.view(len(read), self._groups, -1)
        return self._operations.gated_rms_norm(y, gate, w.norm, self._eps, True)

    def _update_state(
        self, cache: LayerMemory, mixed: torch.Tensor, steps: torch.Tensor, rows: StepRows
    ) -> torch.Tensor:
        """Feed tokens to the state; return its outputs for them, [n, heads, head_dim]."""
        assert isinstance(cache, LayerState)
        assert cache.ssm_state is not None
        w, do = self._weights, self._operations
        mixed = do.short_conv(mixed, w.conv, w.conv_bias, cache.conv_state, rows, True)
        factors = w.log_a, w.dt_bias, w.skip
        return do.selective_scan(mixed, steps, *factors, cache.ssm_state, rows, self._shape)


class ShortConv:
    """A gated convolution; see ``engine.models.block.Mixer``."""

    def __init__(self, weights: ShortConvWeights, operations: Operations, index: int) -> None:
        self._weights = weights
        self._gated_conv = operations.gated_conv
        self._input_name = f"{index}.recurrent.input.weight"
        self.output, self.output_name = weights.output, f"{index}.recurrent.output.weight"

    def __call__(self, read: torch.Tensor, state: StepState, cache: LayerMemory) -> torch.Tensor:
        """See ``Mixer``."""
        fused = project(self._weights.input, read, state.adapters, self._input_name)
        return run_recurrence(state, partial(self._update_state, cache), fused)

    def _update_state(
        self, cache: LayerMemory, fused: torch.Tensor, rows: StepRows
    ) -> torch.Tensor:
        """Feed tokens to the state; return the convolution's outputs for them, [n, channels]."""
        assert isinstance(cache, LayerState)
        weights = self._weights
        return self._gated_conv(fused, weights.conv, weights.bias, cache.conv_state, rows)


def bind_recurrent(
    spec: DecoderSpec,
    weights: RecurrentWeights,
    operations: Operations,
    index: int,
    peers: Peers | None,
) -> GatedDelta | Mamba | ShortConv | ChannelScan:
    """Make the recurrence of layer ``index`` of the model, or of this rank's shard."""
    if isinstance(weights, MambaWeights):
        assert isinstance(spec.recurrence, MambaSpec)
        return Mamba(spec.recurrence, weights, operations, index, peers)
    if isinstance(weights, ChannelScanWeights):
        assert isinstance(spec.recurrence, ChannelScanSpec)
        return ChannelScan(spec.recurrence, weights, operations, index, peers)
    if isinstance(weights, ShortConvWeights):
        return ShortConv(weights, operations, index)
    assert isinstance(spec.recurrence, GatedDeltaSpec)
    return GatedDelta(spec.recurrence, weights, operations, index)


def _group_norm(spec: MambaSpec, weight: torch.Tensor | None) -> torch.Tensor | None:
    """[inner size] -> [groups, inner size / groups]."""
    return None if weight is None else weight.unflatten(0, (spec.num_groups, -1))

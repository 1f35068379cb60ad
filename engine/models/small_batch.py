"""Steps of few tokens, through layers whose products fuse their norms and sums.

    x ─► [ norm ─ qkv ] ─► [ rope ─ store ] ─► [ attention ] ─► [ output ─ x += ]
      ─► [ norm ─ gate, up ─ gating ] ─► [ down ─ x += ]

A step of one sequence is bound by the latency of its kernels in sequence: a layer has six of them
here, against nine in ``block.py``; with experts nine against thirteen. This covers the layers of
most models: attention and a gated MLP, or experts, with a norm before each. Other models, and steps
with anything else to add, go through ``block.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.models.attention import Attention
from engine.models.expert_weights import ExpertWeights, MlpWeights
from engine.models.experts import routing_rule
from engine.models.layer_state import LayerMemory
from engine.models.linear import FusedLinear
from engine.models.mlp import bind_activation
from engine.models.modules import AttentionWeights, Layer
from engine.models.norms import NormWeights
from engine.models.spec import DecoderSpec
from engine.models.step_state import StepState
from kernels.moe import ExpertTensors, GatedActivation, RouterWeights, RoutingRule
from kernels.operations import Operations
from kernels.skinny import MAX_SKINNY_ROWS, RowNorm
from kernels.tiled import TiledWeight


class SmallBatchLayer(NamedTuple):
    """A layer's form for steps of few tokens."""

    attention: Attention
    attention_norm: RowNorm
    qkv: FusedLinear
    output: FusedLinear
    mlp: SmallBatchMlp | SmallBatchExperts

    @classmethod
    def build(
        cls, spec: DecoderSpec, layer: Layer, mixer: object, operations: Operations
    ) -> SmallBatchLayer | None:
        """Make this form of a layer; None if the layer does not allow it.

        Args:
            spec: of the model, which is not sharded.
            layer: its parameters.
            mixer: the part that mixes tokens.
            operations: for what is between the MLP's products.
        """
        limits = [(each.gate_limit, each.expert_gate_limit) for each in spec.layers]
        if not spec.gated or any(pair != (None, None) for pair in limits):
            return None
        weights, gating = layer.mixer, bind_activation(spec, operations)
        attention_norm, mlp_norm = _rms(spec, layer.attention_norm), _rms(spec, layer.mlp_norm)
        others = (
            layer.post_attention_norm,
            layer.post_mlp_norm,
            layer.experts_alongside,
            layer.per_layer_input,
        )
        if (
            not isinstance(mixer, Attention)
            or not isinstance(weights, AttentionWeights)
            or not isinstance(gating, GatedActivation)
            or attention_norm is None
            or mlp_norm is None
            or layer.mlp is None
            or (weights.latent is not None and weights.latent.indexer is not None)
            or any(other is not None for other in others)
            or spec.placement != "pre"
            or spec.residual_scale * layer.scale != 1.0
        ):
            return None
        feed = (
            SmallBatchMlp.build(layer.mlp, mlp_norm, gating)
            if isinstance(layer.mlp, MlpWeights)
            else SmallBatchExperts.build(spec, layer.mlp, mlp_norm, gating, operations)
        )
        qkv, output = weights.qkv, weights.output
        if not isinstance(qkv, FusedLinear) or not isinstance(output, FusedLinear) or feed is None:
            return None
        return cls(mixer, attention_norm, qkv, output, feed)

    def supports(self, x: torch.Tensor, state: StepState) -> bool:
        """Return whether it can run a step with the residual stream ``x``, or finish one."""
        joins_in = (state.adapters, state.images, state.per_layer)
        return x.shape[0] <= self.mlp.max_rows and all(part is None for part in joins_in)

    def __call__(self, x: torch.Tensor, state: StepState, cache: LayerMemory) -> None:
        """Run the layer on the residual stream, [num_tokens, hidden_size], in place."""
        fused = self.qkv.forward_normed(x, self.attention_norm)
        self.finish(x, self.attention.attend(fused, state, cache))

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> None:
        """Do the rest of the layer, from the attention's result on."""
        self.output.add_to(x, attended)
        self.mlp(x)


class SmallBatchMlp(NamedTuple):
    """A gated MLP and the norm before it."""

    norm: RowNorm
    gate_up: FusedLinear
    gating: GatedActivation
    down: FusedLinear

    @classmethod
    def build(
        cls, weights: MlpWeights, norm: RowNorm, gating: GatedActivation
    ) -> SmallBatchMlp | None:
        """Make one of these weights; None if their layers cannot fuse their neighbours."""
        gate_up, down = weights.gate_up, weights.down
        if not isinstance(gate_up, FusedLinear) or not isinstance(down, FusedLinear):
            return None
        return cls(norm, gate_up, gating, down)

    @property
    def max_rows(self) -> int:
        """Up to how many rows it is worth while."""
        return min(self.gate_up.max_fused_rows, self.down.max_fused_rows)

    def __call__(self, x: torch.Tensor) -> None:
        """Add its output to the residual stream."""
        self.down.add_to(x, self.project_up(x))

    def project_up(self, x: torch.Tensor) -> torch.Tensor:
        """From the residual stream to the input of the down projection."""
        return self.gate_up.forward_normed(x, self.norm, self.gating)


class SmallBatchExperts(NamedTuple):
    """Experts, the norm before them, and the shared expert."""

    norm: RowNorm
    router: RouterWeights
    rule: RoutingRule
    experts: ExpertTensors
    gating: GatedActivation
    shared: SmallBatchMlp | None
    operations: Operations

    @classmethod
    def build(
        cls,
        spec: DecoderSpec,
        weights: ExpertWeights,
        norm: RowNorm,
        gating: GatedActivation,
        operations: Operations,
    ) -> SmallBatchExperts | None:
        """Make one of these weights; None if they are not stacked, or outputs are scaled
        elsewhere."""
        experts, moe = weights.stacked, spec.moe
        if (
            experts is None
            or moe is None
            or moe.apply_router_weight_on_input
            or moe.local_expert_range is not None
        ):
            return None
        if weights.latent is not None:
            return None
        if weights.scale is not None or weights.shared_gate is not None or moe.shared_scale != 1.0:
            return None
        if not all(isinstance(part, TiledWeight) or part.is_contiguous() for part in experts[:2]):
            return None
        shared = None
        if weights.shared is not None:
            shared = SmallBatchMlp.build(weights.shared, norm, gating)
            if shared is None:
                return None
        return cls(norm, weights.router, routing_rule(moe), experts, gating, shared, operations)

    @property
    def max_rows(self) -> int:
        """Up to how many rows it is worth while: experts take most of the time."""
        return MAX_SKINNY_ROWS

    def __call__(self, x: torch.Tensor) -> None:
        """Add their output to the residual stream."""
        inner = None if self.shared is None else self.shared.project_up(x)
        self.operations.add_experts(x, self.norm, self.router, self.rule, self.experts, self.gating)
        if self.shared is not None and inner is not None:
            self.shared.down.add_to(x, inner)


def _rms(spec: DecoderSpec, norm: NormWeights | None) -> RowNorm | None:
    if norm is None or spec.norm.kind != "rms":
        return None
    if norm.bias is not None or norm.gate is not None:
        return None
    return RowNorm(norm.weight, spec.norm.eps)

"""Steps of few tokens, through layers whose products take their norms and sums along.

    x ─► [ norm ─ qkv ] ─► rope ─ store ─► attention ─► [ output ─ x += ]
      ─► [ norm ─ gate, up ─ gating ] ─► [ down ─ x += ]

A step of a text or two is bound by the latency of its kernels, one after the other: a layer is
seven of them here, and ten as ``block.py`` has it. It takes the layers that most models are made
of, attention and a gated MLP with a norm before each; other models, and steps in which something
else joins in, go through ``block.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.models.attention import Attention
from engine.models.linear import FusedLinear
from engine.models.mlp import bind_activation
from engine.models.modules import AttentionWeights, Layer, MlpWeights
from engine.models.norms import NormWeights
from engine.models.recurrent import LayerMemory
from engine.models.spec import DecoderSpec
from engine.models.step_state import StepState
from kernels.moe import Gating
from kernels.operations import Operations
from kernels.skinny import MOST_ROWS, RowNorm


class FewTokens(NamedTuple):
    """A layer as it takes a step of few tokens."""

    attention: Attention
    attention_norm: RowNorm
    qkv: FusedLinear
    output: FusedLinear
    mlp_norm: RowNorm
    gate_up: FusedLinear
    gating: Gating
    down: FusedLinear

    @classmethod
    def of(
        cls, spec: DecoderSpec, layer: Layer, mixer: object, operations: Operations
    ) -> FewTokens | None:
        """The layer, or None where it is none of these.

        Args:
            spec: of the model; all of it is here.
            layer: its parameters.
            mixer: what mixes its tokens.
            operations: for what stands between the MLP's products.
        """
        weights, mlp, gating = layer.mixer, layer.mlp, bind_activation(spec, operations)
        attention_norm, mlp_norm = _rms(spec, layer.attention_norm), _rms(spec, layer.mlp_norm)
        others = (layer.attention_after, layer.mlp_after, layer.beside, layer.part)
        if (
            not isinstance(mixer, Attention)
            or not isinstance(weights, AttentionWeights)
            or not isinstance(mlp, MlpWeights)
            or not isinstance(gating, Gating)
            or attention_norm is None
            or mlp_norm is None
            or any(other is not None for other in others)
            or spec.placement != "pre"
            or spec.residual_scale * layer.scale != 1.0
        ):
            return None
        qkv, output, gate_up, down = weights.qkv, weights.output, mlp.gate_up, mlp.down
        if (
            not isinstance(qkv, FusedLinear)
            or not isinstance(output, FusedLinear)
            or not isinstance(gate_up, FusedLinear)
            or not isinstance(down, FusedLinear)
        ):
            return None
        return cls(mixer, attention_norm, qkv, output, mlp_norm, gate_up, gating, down)

    def __call__(self, x: torch.Tensor, state: StepState, cache: LayerMemory) -> None:
        """Run the layer on the residual stream, [num_tokens, hidden_size], in place."""
        fused = self.qkv.normed(x, self.attention_norm)
        self.finish(x, self.attention.attend(fused, state, cache))

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> None:
        """The same from what attention gave on."""
        self.output.add_to(x, attended)
        self.down.add_to(x, self.gate_up.normed(x, self.mlp_norm, self.gating))


def takes(x: torch.Tensor, state: StepState) -> bool:
    """Whether such layers can be given a step, whose residual stream is ``x``, or some tokens of
    it that are left."""
    joins_in = (state.adapters, state.images, state.per_layer)
    return x.shape[0] <= MOST_ROWS and all(part is None for part in joins_in)


def _rms(spec: DecoderSpec, norm: NormWeights | None) -> RowNorm | None:
    if norm is None or norm.bias is not None or spec.norm.kind != "rms":
        return None
    return RowNorm(norm.weight, spec.norm.eps)

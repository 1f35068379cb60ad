"""A layer's attention to a source, the output of an encoder (Vaswani et al. 2017).

A source's keys and values are made once, when its places are computed, and lie in the layer's cache
in front of the text's (``kernels/source.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from engine.models.linear import Linear, LinearMethod
from engine.models.loader import load_matrix
from engine.models.norms import Norm, NormWeights, bind_norm
from engine.models.spec import DecoderSpec
from engine.models.step_state import StepState
from kernels.attention import LayerAttention, LayerCache
from kernels.operations import Kernels


class CrossAttentionWeights(NamedTuple):
    """The loaded weights of a layer's attention to a source."""

    norm: NormWeights  # of the text
    query: Linear
    key_value: Linear  # of the source
    output: Linear

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        return sum(part.num_bytes for part in self)


def make_cross_attention(
    spec: DecoderSpec, weights: Mapping[str, torch.Tensor], method: LinearMethod, i: int
) -> CrossAttentionWeights | None:
    """Make that of layer ``i``; None if the model has no source.

    It takes ownership of the parameters.
    """
    if spec.source is None:
        return None
    name = f"{i}.cross."

    def linear(part: str, bias: torch.Tensor) -> Linear:
        return method.make(load_matrix(weights, f"{name}{part}.weight"), bias)

    of_values = weights[name + "value.bias"]
    return CrossAttentionWeights(
        norm=NormWeights(weights[f"{i}.cross_norm"], weights[f"{i}.cross_norm.bias"]),
        query=linear("query", weights[name + "query.bias"]),
        key_value=linear("key_value", torch.cat((torch.zeros_like(of_values), of_values))),
        output=linear("output", weights[name + "output.bias"]),
    )


class CrossAttention:
    """Stores a source's keys and values, and attends to them.

    Args:
        spec: of the model.
        weights: the layer's.
        kernels: compute the attention.
    """

    def __init__(self, spec: DecoderSpec, weights: CrossAttentionWeights, kernels: Kernels) -> None:
        self.norm: Norm = bind_norm(spec.norm, weights.norm, kernels.operations)
        self._spec = spec
        self._weights = weights
        self._kernels = kernels
        self._layer = LayerAttention(spec.score_scale, reads_source=True)

    def store(self, source: torch.Tensor, slots: torch.Tensor, cache: LayerCache) -> None:
        """Store the keys and values of some places of a source.

        Args:
            source: [n, hidden_size], the encoder's output there.
            slots: [n] int64, where they go in the cache.
            cache: the layer's, updated in place.
        """
        spec = self._spec
        made = self._weights.key_value(source).view(-1, 2 * spec.num_kv_heads, spec.head_dim)
        self._kernels.operations.norm_rope_store(made, None, spec.norm.eps, None, cache, slots)

    def __call__(self, read: torch.Tensor, state: StepState, cache: LayerCache) -> torch.Tensor:
        """Attend: [num_text_tokens, hidden_size] -> the same, to be added."""
        spec = self._spec
        query = self._weights.query(read).view(-1, spec.num_heads, spec.head_dim)
        attended = self._kernels.attention.forward(state.attention, self._layer, query, cache)
        return self._weights.output(attended.view(-1, spec.query_size))


def of_text(state: StepState, indices: torch.Tensor | None) -> StepState:
    """Return the state of only some of a step's tokens; None: all of them."""
    if indices is None:
        return state
    slots, positions = (
        each.index_select(0, indices) for each in (state.slot_mapping, state.positions)
    )
    return replace(state, slot_mapping=slots, positions=positions, images=None)

"""Embeddings of each layer (Gemma 4): every token has a few numbers of its own for every layer.

    token ─► table ───────────────────┬─► [n, layers, size], a part for each layer
    embedding ─► projection ─► norm ──┘

Behind its MLP a layer scales its part by gates made of the residual stream, and adds what a
projection and a norm make of that.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.models.mlp import bind_activation
from engine.models.norms import bind_norm
from engine.models.per_layer_weights import LayerPartWeights, PerLayerWeights
from engine.models.spec import DecoderSpec
from kernels.operations import Operations


class PerLayer:
    """From a step's tokens to the parts of all layers."""

    def __init__(self, spec: DecoderSpec, weights: PerLayerWeights, operations: Operations) -> None:
        self._weights = weights
        self._norm = bind_norm(spec.norm, weights.norm, operations)
        self._shape = spec.num_layers_ahead, spec.per_layer_size
        # As a tensor of the model's dtype would hold it, which checkpoints were trained with.
        dtype = weights.norm.weight.dtype
        self._scale = torch.tensor(spec.per_layer_size**0.5, dtype=dtype).item()
        self._projection_scale = spec.hidden_size**-0.5

    def __call__(self, input_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Ids [n] int64 and their embeddings [n, hidden_size] -> [n, layers, per_layer_size]."""
        of_tokens = self._weights.embed(input_ids) * self._scale
        seen = self._weights.projection(x) * self._projection_scale
        normed = self._norm(seen.view(-1, self._shape[1])).view(of_tokens.shape)
        return ((normed + of_tokens) * 2**-0.5).unflatten(1, self._shape)


class LayerPart:
    """What a layer adds to the residual stream of its part."""

    def __init__(
        self, spec: DecoderSpec, weights: LayerPartWeights, operations: Operations
    ) -> None:
        self._weights = weights
        self._activate = bind_activation(replace(spec, gated=False), operations)
        self._after = bind_norm(spec.norm, weights.after, operations)

    def __call__(self, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """The residual stream [n, hidden_size] and the part [n, per_layer_size] -> what is added,
        [n, hidden_size]."""
        gated = self._activate(self._weights.gate(x)) * part
        return self._after(self._weights.output(gated))

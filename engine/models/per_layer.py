"""Per-layer embeddings (Gemma 3n and 4): every token has a small embedding for each layer.

    token ─► table ───────────────────┬─► [n, layers, size], a part for each layer
    embedding ─► projection ─► norm ──┘

After its MLP a layer multiplies its part by gates computed from the residual stream, projects and
norms the product, and adds the result to the stream.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.models.mlp import bind_activation
from engine.models.norms import bind_norm
from engine.models.per_layer_weights import PerLayerEmbeddingWeights, PerLayerInputWeights
from engine.models.spec import DecoderSpec
from kernels.operations import Operations


class PerLayerEmbeddings:
    """Computes the parts of all layers from a step's tokens."""

    def __init__(
        self, spec: DecoderSpec, weights: PerLayerEmbeddingWeights, operations: Operations
    ) -> None:
        self._weights = weights
        self._norm = bind_norm(spec.norm, weights.norm, operations)
        self._shape = spec.num_remaining_layers, spec.per_layer_size
        # Tokens behind the table have the embedding of the first one (Gemma 3n).
        self._table_size = spec.per_layer_vocab_size
        self._has_all = spec.per_layer_vocab_size >= spec.vocab_size
        # Rounded to the model's dtype, as in the code that checkpoints were trained with.
        dtype = weights.norm.weight.dtype
        self._scale = torch.tensor(spec.per_layer_size**0.5, dtype=dtype).item()
        self._projection_scale = spec.hidden_size**-0.5

    def __call__(self, input_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Ids [n] int64 and their embeddings [n, hidden_size] -> [n, layers, per_layer_size]."""
        if not self._has_all:
            input_ids = input_ids.masked_fill(input_ids >= self._table_size, 0)
        of_tokens = self._weights.embed(input_ids) * self._scale
        seen = self._weights.projection(x) * self._projection_scale
        normed = self._norm(seen.view(-1, self._shape[1])).view(of_tokens.shape)
        return ((normed + of_tokens) * 2**-0.5).unflatten(1, self._shape)


class PerLayerInput:
    """Computes what a layer adds to the residual stream from its part."""

    def __init__(
        self, spec: DecoderSpec, weights: PerLayerInputWeights, operations: Operations
    ) -> None:
        self._weights = weights
        self._activate = bind_activation(replace(spec, gated=False), operations)
        self._post_norm = bind_norm(spec.norm, weights.post_norm, operations)

    def __call__(self, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Stream [n, hidden_size] and part [n, per_layer_size] -> addend [n, hidden_size]."""
        gated = self._activate(self._weights.gate(x)) * part
        return self._post_norm(self._weights.output(gated))

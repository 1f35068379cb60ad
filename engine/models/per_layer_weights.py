"""The loaded weights of per-layer embeddings; see ``engine/models/per_layer.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from engine.models.linear import Linear, LinearMethod
from engine.models.loader import load_matrix
from engine.models.norms import NormWeights


class PerLayerInputWeights(NamedTuple):
    """The weights that a layer applies to its part."""

    gate: Linear  # hidden_size to per_layer_size
    output: Linear  # and back
    post_norm: NormWeights

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        return sum(part.num_bytes for part in self)


class PerLayerEmbeddingWeights(NamedTuple):
    """The weights that make the parts of all layers."""

    embed: Callable[[torch.Tensor], torch.Tensor]  # ids [n] -> [n, layers * per_layer_size]
    projection: Linear  # hidden_size to layers * per_layer_size
    norm: NormWeights  # [per_layer_size]
    table_bytes: int

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        return self.table_bytes + self.projection.num_bytes + self.norm.num_bytes


def make_per_layer_input(
    weights: Mapping[str, torch.Tensor], method: LinearMethod, i: int
) -> PerLayerInputWeights | None:
    """Make those of layer ``i``; None if the model has no per-layer embeddings."""
    after = weights.get(f"{i}.per_layer.after")
    if after is None:
        return None
    gate, output = (
        method.make(load_matrix(weights, f"{i}.per_layer.{name}.weight"), None)
        for name in ("gate", "output")
    )
    return PerLayerInputWeights(gate, output, NormWeights(after))


def make_per_layer(
    weights: Mapping[str, torch.Tensor],
    method: LinearMethod,
    embed: Callable[[torch.Tensor], torch.Tensor],
    table_bytes: int,
) -> PerLayerEmbeddingWeights:
    """Make the weights that compute the parts; ``embed`` looks up the table."""
    projection = method.make(load_matrix(weights, "per_layer.projection.weight"), None)
    return PerLayerEmbeddingWeights(
        embed, projection, NormWeights(weights["per_layer.norm"]), table_bytes
    )

"""What is loaded of embeddings of each layer; ``engine/models/per_layer.py`` says what they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from engine.models.linear import Linear, LinearMethod
from engine.models.loader import stored
from engine.models.norms import NormWeights


class LayerPartWeights(NamedTuple):
    """What a layer makes of its part with."""

    gate: Linear  # hidden_size to per_layer_size
    output: Linear  # and back
    after: NormWeights

    @property
    def num_bytes(self) -> int:
        """What they take in memory."""
        return sum(part.num_bytes for part in self)


class PerLayerWeights(NamedTuple):
    """What the parts of all layers are made with."""

    embed: Callable[[torch.Tensor], torch.Tensor]  # ids [n] -> [n, layers * per_layer_size]
    projection: Linear  # hidden_size to as many
    norm: NormWeights  # [per_layer_size]
    table_bytes: int

    @property
    def num_bytes(self) -> int:
        """What they take in memory."""
        return self.table_bytes + self.projection.num_bytes + self.norm.num_bytes


def make_layer_part(
    weights: Mapping[str, torch.Tensor], method: LinearMethod, i: int
) -> LayerPartWeights | None:
    """That of layer ``i``; None where the model embeds nothing for it."""
    after = weights.get(f"{i}.per_layer.after")
    if after is None:
        return None
    gate, output = (
        method.make(stored(weights, f"{i}.per_layer.{name}.weight"), None)
        for name in ("gate", "output")
    )
    return LayerPartWeights(gate, output, NormWeights(after))


def make_per_layer(
    weights: Mapping[str, torch.Tensor],
    method: LinearMethod,
    embed: Callable[[torch.Tensor], torch.Tensor],
    table_bytes: int,
) -> PerLayerWeights:
    """What makes the parts, beside the table that ``embed`` looks up."""
    projection = method.make(stored(weights, "per_layer.projection.weight"), None)
    return PerLayerWeights(embed, projection, NormWeights(weights["per_layer.norm"]), table_bytes)

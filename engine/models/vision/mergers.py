"""Mergers of single families, made from their weights."""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.models.vision.layers import ACTIVATIONS, Tensors, read_norm, read_projection
from engine.models.vision.spec import GatedMergerSpec, VisionSpec


class GatedMerger:
    """Turns the patches of each cell into an embedding of the text model; see ``GatedMergerSpec``.

    Args:
        spec: of the encoder.
        merger: its merger's.
        weights: of the encoder.
    """

    def __init__(self, spec: VisionSpec, merger: GatedMergerSpec, weights: Tensors) -> None:
        self._width = spec.merged_size
        self._join = read_projection(weights, "merger.join")
        self._project = read_projection(weights, "merger.projection")
        self._norm = read_norm(merger.norm, weights, "merger.norm")
        self._up = read_projection(weights, "merger.up")
        self._activate = ACTIVATIONS[merger.activation]
        self._down = read_projection(weights, "merger.down")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_patches, hidden_size], each cell's patches adjacent -> [num_cells, out_size]."""
        joined = self._join(x.reshape(-1, self._width))
        gate, up = self._up(functional.gelu(self._norm(self._project(joined)))).chunk(2, dim=-1)
        return self._down(self._activate(gate).mul_(up))


class Adapter:
    """Turns the patches of each cell into an embedding of the text model; see ``AdapterSpec``.

    Args:
        spec: of the encoder.
        weights: of the encoder.
    """

    def __init__(self, spec: VisionSpec, weights: Tensors) -> None:
        self._width = spec.merged_size
        self._up = read_projection(weights, "merger.up")
        self._down = read_projection(weights, "merger.down")
        self._project = read_projection(weights, "merger.projection")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_patches, hidden_size], each cell's patches adjacent -> [num_cells, out_size]."""
        inner = functional.gelu(self._up(x.reshape(-1, self._width)))
        return self._project(functional.gelu(self._down(inner)))

"""Layers of LFM3-VL's encoder that mix neighbouring patches by convolutions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from engine.models.vision.layers import ACTIVATIONS, Tensors, read_norm, read_projection
from engine.models.vision.patches import chunk_slices
from engine.models.vision.spec import VisionSpec


class ConvBlock:
    """A gated depthwise convolution over the image's patches, and a gated MLP.

    Args:
        spec: of the encoder.
        weights: its parameters.
        name: the prefix of the layer's.
    """

    def __init__(self, spec: VisionSpec, weights: Tensors, name: str) -> None:
        self._activate = ACTIVATIONS[spec.activation]
        self._padding = spec.conv_size // 2
        self._norm = read_norm(spec.norm, weights, f"{name}.attention_norm")
        self._input = read_projection(weights, f"{name}.conv_in")
        self._kernel = weights[f"{name}.conv.weight"]
        self._output = read_projection(weights, f"{name}.output")
        self._mlp_norm = read_norm(spec.norm, weights, f"{name}.mlp_norm")
        self._up = read_projection(weights, f"{name}.up")
        self._down = read_projection(weights, f"{name}.down")

    def forward_chunks(
        self, x: torch.Tensor, raster: torch.Tensor, size: tuple[int, int], max_patches: int
    ) -> Iterator[None]:
        """Compute [num_patches, hidden_size] in place, ``max_patches`` patches per iteration.

        Args:
            x: the patches, in any order.
            raster: [num_patches] int64, where each is in the image, row by row.
            size: rows and columns of the image.
            max_patches: per iteration.
        """
        grid, gates = torch.empty_like(x), torch.empty_like(x)
        for rows in chunk_slices(x.shape[0], max_patches):
            inner, gates[rows], values = self._input(self._norm(x[rows])).chunk(3, dim=-1)
            grid[raster[rows]] = inner * values
            yield
        plane = grid.T.unflatten(1, size)[None]  # [1, hidden_size, rows, columns]
        mixed = functional.conv2d(
            plane, self._kernel, padding=self._padding, groups=self._kernel.shape[0]
        )
        grid = mixed[0].flatten(1).T  # [num_patches, hidden_size], row by row
        yield
        for rows in chunk_slices(x.shape[0], max_patches):
            part = x[rows]
            part += self._output(gates[rows] * grid[raster[rows]])
            gate, up = self._up(self._mlp_norm(part)).chunk(2, dim=-1)
            part += self._down(self._activate(gate).mul_(up))
            yield

"""The part of MiniCPM-V's encoder in which squares of patches become one."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch.nn import functional

from engine.models.vision.layers import Tensors, read_norm, read_projection
from engine.models.vision.patches import chunk_slices
from engine.models.vision.spec import InnerMergeSpec, VisionSpec
from kernels.dense import attend


class InnerMerger:
    """Merges adjacent patches; see ``InnerMergeSpec``.

    Args:
        spec: of the encoder.
        merge: its inner merge.
        weights: its parameters.
    """

    def __init__(self, spec: VisionSpec, merge: InnerMergeSpec, weights: Tensors) -> None:
        self.layer = merge.layer
        self._length = merge.side**2
        self._shape = -1, self._length, 3, spec.num_heads, spec.head_dim
        self._attention_norm = read_norm(spec.norm, weights, "inner.attention_norm")
        self._qkv = read_projection(weights, "inner.qkv")
        self._output = read_projection(weights, "inner.output")
        self._norm = read_norm(spec.norm, weights, "inner.norm")
        self._up = read_projection(weights, "inner.up")
        self._down = read_projection(weights, "inner.down")

    def merge_chunks(
        self, x: torch.Tensor, max_patches: int
    ) -> Generator[None, None, torch.Tensor]:
        """[num_patches, hidden_size], squares adjacent -> [num_patches / side ** 2, hidden_size].

        ``max_patches`` at a time, whole squares.
        """
        parts = []
        for rows in chunk_slices(x.shape[0], max_patches):
            parts.append(self._merge(x[rows]))
            yield
        return torch.cat(parts)

    def _merge(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self._qkv(self._attention_norm(x)).view(self._shape).unbind(2)
        keys, values = (each.transpose(1, 2).contiguous() for each in (key, value))
        x = x + self._output(attend(query, keys, values).view(x.shape))
        squares = x.unflatten(0, (-1, self._length))
        inner = self._up(self._norm(squares.flatten(1)))
        return self._down(functional.gelu(inner, approximate="tanh")) + squares.mean(1)

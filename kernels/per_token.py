"""Attention whose result for a token does not depend on how its prompt is cut into chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kernels.attention import (
    AttentionBackend,
    AttentionSpec,
    BatchGeometry,
    DeviceGeometry,
    LayerAttention,
    LayerCache,
)


class PerTokenAttention:
    """Every token of a chunk as a row of its own, of the length that ends with it.

    A backend sums a single query's keys in one order and a chunk's in another. This way there is
    one: what the inner backend does with single queries, which must not depend on the batch. The
    price is that a chunk's tokens do not share what they read.
    """

    def __init__(self, inner: AttentionBackend) -> None:
        self.name = inner.name
        self.is_capturable = inner.is_capturable  # of decode steps, which are as they were
        self._inner = inner

    def refuse(self, spec: AttentionSpec) -> str | None:
        """See ``AttentionBackend.refuse``."""
        if spec.looks_ahead:
            return "each token is computed by itself and sees no later one"
        return self._inner.refuse(spec)

    def fits(self, captured: BatchGeometry, actual: BatchGeometry, spec: AttentionSpec) -> bool:
        """See ``AttentionBackend.fits``; rows of one token each are captured alone."""
        return self._inner.fits(captured, actual, spec)

    def plan(self, geometry: BatchGeometry, spec: AttentionSpec) -> Any:
        """See ``AttentionBackend.plan``."""
        lengths = np.diff(geometry.query_start)
        if (lengths == 1).all():
            return self._inner.plan(geometry, spec)
        ends = np.arange(geometry.query_start[-1]) + 1  # tokens of the batch up to each one
        starts = np.repeat(geometry.seq_lens - geometry.query_start[1:], lengths)
        query_start = np.append(0, ends).astype(np.int32)
        seq_lens = (starts + ends).astype(np.int32)
        slots = np.repeat(geometry.slots, lengths)
        host = (query_start, seq_lens, slots)
        starts, lens, lines = (torch.from_numpy(array).to(spec.device) for array in host)
        on_device = DeviceGeometry(starts, lens, lines, geometry.device.tables)
        expanded = BatchGeometry(query_start, seq_lens, slots, geometry.tables, on_device)
        return self._inner.plan(expanded, spec)

    def forward(
        self, state: Any, layer: LayerAttention, query: torch.Tensor, cache: LayerCache
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        return self._inner.forward(state, layer, query, cache)

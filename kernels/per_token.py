"""Attention whose result for a token does not depend on how its prompt is split into chunks."""

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
    """Treats every token of a chunk as a row of its own, whose length ends with the token.

    Backends sum the keys of a single query in one order and those of a chunk in another. Here only
    the first one occurs, in which the inner backend must be batch-invariant. The cost is that a
    chunk's tokens do not share what they read.
    """

    def __init__(self, inner: AttentionBackend) -> None:
        self.name = inner.name
        self.is_capturable = inner.is_capturable  # for decode steps, which are unchanged
        self._inner = inner

    def refuse(self, spec: AttentionSpec) -> str | None:
        """See ``AttentionBackend.refuse``."""
        if spec.is_bidirectional:
            return "each token is computed by itself and sees no later one"
        return self._inner.refuse(spec)

    def can_replay(
        self, captured: BatchGeometry, actual: BatchGeometry, spec: AttentionSpec
    ) -> bool:
        """See ``AttentionBackend.can_replay``; only rows of one token each are ever captured."""
        return self._inner.can_replay(captured, actual, spec)

    def plan(self, geometry: BatchGeometry, spec: AttentionSpec) -> Any:
        """See ``AttentionBackend.plan``."""
        lengths = np.diff(geometry.query_start)
        if (lengths == 1).all():
            return self._inner.plan(geometry, spec)
        ends = np.arange(geometry.query_start[-1]) + 1  # tokens of the batch up to and with each
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

"""Attention of models whose layers have heads of several kinds (Gemma 4), on any backend.

Layers that see everything have fewer KV heads, and wider ones, than those with a window. The
backend underneath knows one kind at a time: it plans a step once for each, and a layer's cache
tells which of the plans is the layer's.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.attention import (
    AttentionBackend,
    AttentionSpec,
    BatchGeometry,
    LayerAttention,
    LayerCache,
)

HeadsState = dict[tuple[int, int], Any]  # a step's plans, by the KV heads and their width


class SeveralHeadsAttention:
    """A backend for such models, made of one that takes one kind of heads.

    Args:
        inner: what computes it.
    """

    def __init__(self, inner: AttentionBackend) -> None:
        self.name = inner.name
        self.is_capturable = inner.is_capturable
        self._inner = inner

    def refuse(self, spec: AttentionSpec) -> str | None:
        """See ``AttentionBackend.refuse``."""
        reasons = (self._inner.refuse(each) for each in spec.by_heads().values())
        return next((reason for reason in reasons if reason is not None), None)

    def fits(self, captured: BatchGeometry, actual: BatchGeometry, spec: AttentionSpec) -> bool:
        """See ``AttentionBackend.fits``."""
        return all(self._inner.fits(captured, actual, each) for each in spec.by_heads().values())

    def plan(self, geometry: BatchGeometry, spec: AttentionSpec) -> HeadsState:
        """See ``AttentionBackend.plan``."""
        kinds = spec.by_heads()
        return {heads: self._inner.plan(geometry, each) for heads, each in kinds.items()}

    def forward(
        self,
        state: HeadsState,
        layer: LayerAttention,
        query: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        _, num_kv_heads, _, head_dim = cache.keys.shape
        return self._inner.forward(state[num_kv_heads, head_dim], layer, query, cache)

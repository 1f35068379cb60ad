"""Attention for models whose layers have different kinds of heads, on any backend.

Full attention layers may have fewer and wider KV heads than windowed ones (Gemma 4), or fewer query
heads (Laguna). The inner backend supports one kind at a time: it plans a step once for each, and a
layer's queries and cache show which plan applies.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.attention import (
    AttentionBackend,
    AttentionSpec,
    BatchGeometry,
    Heads,
    LayerAttention,
    LayerCache,
)

HeadsState = dict[Heads, Any]  # a step's plans


class MixedHeadsAttention:
    """A backend for such models, built on one for a single kind of heads.

    Args:
        inner: the backend that computes.
    """

    def __init__(self, inner: AttentionBackend) -> None:
        self.name = inner.name
        self.is_capturable = inner.is_capturable
        self._inner = inner

    def refuse(self, spec: AttentionSpec) -> str | None:
        """See ``AttentionBackend.refuse``."""
        reasons = (self._inner.refuse(each) for each in spec.by_heads().values())
        return next((reason for reason in reasons if reason is not None), None)

    def can_replay(
        self, captured: BatchGeometry, actual: BatchGeometry, spec: AttentionSpec
    ) -> bool:
        """See ``AttentionBackend.can_replay``."""
        return all(
            self._inner.can_replay(captured, actual, each) for each in spec.by_heads().values()
        )

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
        heads = query.shape[1], num_kv_heads, head_dim
        return self._inner.forward(state[heads], layer, query, cache)

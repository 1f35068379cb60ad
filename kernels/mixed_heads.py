"""Attention for models whose layers have different kinds of heads (Gemma 4), on any backend.

Full attention layers have fewer and wider KV heads than windowed ones. The inner backend supports
one kind at a time: it plans a step once for each, and a layer's cache shows which plan applies.
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
    NewTokens,
    StoringAttention,
)

HeadsState = dict[tuple[int, int], Any]  # a step's plans, by the number of KV heads and their width


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
        return self._inner.forward(state[num_kv_heads, head_dim], layer, query, cache)

    def store_and_attend(
        self,
        state: HeadsState,
        layer: LayerAttention,
        tokens: NewTokens,
        cache: LayerCache,
    ) -> torch.Tensor | None:
        """See ``StoringAttention``; None if the inner backend is none."""
        if not isinstance(self._inner, StoringAttention):
            return None
        _, num_kv_heads, _, head_dim = cache.keys.shape
        return self._inner.store_and_attend(state[num_kv_heads, head_dim], layer, tokens, cache)

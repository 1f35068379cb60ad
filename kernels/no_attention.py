"""The attention of models in which no layer attends (Mamba-2): nothing is planned or computed."""

from __future__ import annotations

import torch

from kernels.attention import (
    AttentionBackend,
    AttentionSpec,
    BatchGeometry,
    LayerAttention,
    LayerCache,
)


class NoAttention:
    """Stands in for a backend, whose other kernels compute the model.

    Args:
        inner: that backend.
    """

    def __init__(self, inner: AttentionBackend) -> None:
        self.name = inner.name
        self.is_capturable = inner.is_capturable
        self._inner = inner

    def refuse(self, spec: AttentionSpec) -> str | None:
        """See ``AttentionBackend.refuse``."""
        return self._inner.refuse(spec)

    def can_replay(
        self, captured: BatchGeometry, actual: BatchGeometry, spec: AttentionSpec
    ) -> bool:
        """See ``AttentionBackend.can_replay``: a capture has no bounds."""
        return True

    def plan(self, geometry: BatchGeometry, spec: AttentionSpec) -> None:
        """See ``AttentionBackend.plan``."""

    def forward(
        self, state: None, layer: LayerAttention, query: torch.Tensor, cache: LayerCache
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``. Raises AssertionError: there is no such layer."""
        raise AssertionError("attention in a model without it")

"""Attention over a paged KV cache: the nouns and the protocol of a backend.

    geometry of a step ──► backend.plan() ──► state ──► backend.forward() once a layer

A backend is chosen once, at start (``kernels/select.py``). The state of a step is made by
``plan`` and handed to ``forward`` as an argument; nothing is kept between steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a model asks of its attention; a backend refuses what it cannot do."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...] = (None,)  # the distinct windows of the layers, in tokens
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """One layer's attention: ``softmax(softcap(q k^T * scale) + mask) v``.

    The mask is causal; a query at position p sees the ``window`` positions (p - window, p].
    """

    scale: float
    window: int | None = None
    softcap: float | None = None  # c * tanh(x / c), as in Gemma 2


class LayerCache(NamedTuple):
    """One layer's keys and values, each [num_blocks, num_kv_heads, block_size, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class BatchGeometry:
    """Where each row of a ragged batch lies, on the host.

    Row i holds query tokens [query_start[i], query_start[i + 1]) of the batch. They are the last
    ones of its ``seq_lens[i]`` tokens, all of which have a slot in ``block_tables[i]``.
    """

    query_start: np.ndarray  # [num_rows + 1] int64, starts with 0
    seq_lens: np.ndarray  # [num_rows] int64, this step's tokens included
    block_tables: np.ndarray  # [num_rows, max blocks of the batch] int64, 0 where unused


class AttentionBackend(Protocol):
    """A way to compute paged attention."""

    name: str

    def refuse(self, spec: AttentionSpec) -> str | None:
        """Why this backend cannot serve the model here, or None when it can."""
        ...

    def plan(self, geometry: BatchGeometry, spec: AttentionSpec) -> Any:
        """What the layers of one step share: index tensors, masks, splits."""
        ...

    def forward(
        self,
        state: Any,
        layer: LayerAttention,
        query: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        """Attend to what the cache holds; this step's keys and values are stored already.

        Args:
            state: what ``plan`` made for this step.
            layer: the layer's scale, window and cap.
            query: [num_tokens, num_heads, head_dim].
            cache: the layer's blocks.

        Returns:
            [num_tokens, num_heads, head_dim] in the query's dtype.
        """
        ...

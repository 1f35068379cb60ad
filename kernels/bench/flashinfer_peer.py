"""FlashInfer's paged attention as a peer, where it is installed (https://flashinfer.ai).

It reads the same blocks as our kernels. What it plans on the host is planned before it is timed, as
our own plan is.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kernels.attention import BatchGeometry, LayerCache

_WORKSPACE_BYTES = 256 << 20
_MAX_HEAD_DIM = 256


def flashinfer_attention(
    geometry: BatchGeometry, query: torch.Tensor, cache: LayerCache, scale: float
) -> Callable[[], torch.Tensor] | None:
    """Return a function that attends causally; None if FlashInfer is missing or cannot.

    Args:
        geometry: the batch.
        query: [tokens, heads, head_dim].
        cache: keys and values, [blocks, kv_heads, block_size, head_dim] each.
        scale: of the scores.
    """
    num_heads, head_dim = query.shape[1:]
    is_there = query.device.type == "cuda" and importlib.util.find_spec("flashinfer") is not None
    if not is_there or head_dim > _MAX_HEAD_DIM:
        return None
    flashinfer: Any = importlib.import_module("flashinfer")
    num_kv_heads, block_size = cache.keys.shape[1:3]
    pages = _pages(geometry, block_size)
    shape = (num_heads, num_kv_heads, head_dim, block_size)
    options = {"sm_scale": scale, "q_data_type": query.dtype, "kv_data_type": query.dtype}
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
    if geometry.is_decode:
        # Left to itself it takes its kernels for Hopper, which do not split a sequence's keys: on
        # an H200 they took 3 to 12 times as long as ours.
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=num_heads > num_kv_heads, backend="fa2"
        )
        wrapper.plan(*pages, *shape, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        starts = torch.from_numpy(geometry.query_start)
        wrapper.plan(starts, *pages, *shape, causal=True, **options)
    stored = (cache.keys, cache.values)
    return lambda: wrapper.run(query, stored)


def _pages(
    geometry: BatchGeometry, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where rows begin in the list of blocks, that list, and the tokens in their last blocks."""
    num_blocks = -(-geometry.seq_lens // block_size)
    starts = np.concatenate(([0], num_blocks.cumsum()))
    tables = geometry.block_tables(block_size)
    blocks = np.concatenate([row[:count] for row, count in zip(tables, num_blocks, strict=True)])
    last = geometry.seq_lens - (num_blocks - 1) * block_size
    indptr, indices, last_len = (
        torch.from_numpy(each.astype(np.int32)) for each in (starts, blocks, last)
    )
    return indptr, indices, last_len

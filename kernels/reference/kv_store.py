"""Writes into the paged KV cache."""

from __future__ import annotations

import torch

from kernels.attention import LayerCache
from kernels.reference.cache_codes import as_bytes, encode


def cache_rows(slot_mapping: torch.Tensor, num_kv_heads: int, block_size: int) -> torch.Tensor:
    """Where each token's heads lie in a cache seen as rows of head_dim: [n] -> [n * heads].

    Args:
        slot_mapping: [n] int64, ``block * block_size + offset`` of each token.
        num_kv_heads: of the cache.
        block_size: tokens a block.
    """
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    heads = torch.arange(num_kv_heads, device=slot_mapping.device)
    rows = (block * num_kv_heads).unsqueeze(1) + heads
    return (rows * block_size + offset.unsqueeze(1)).flatten()


def store_kv(
    keys: torch.Tensor, values: torch.Tensor, cache: LayerCache, rows: torch.Tensor
) -> None:
    """Put a step's keys and values, [n, kv_heads, head_dim], in their slots, as codes with their
    scales where that is what the cache holds.

    Args:
        keys, values: of the step's tokens; keys with their positions applied.
        cache: the layer's blocks, written in place.
        rows: what ``cache_rows`` gave for the step.
    """
    head_dim = keys.shape[-1]
    for new, stored, scales in (
        (keys, cache.keys, cache.key_scales),
        (values, cache.values, cache.value_scales),
    ):
        content = new.reshape(-1, head_dim)
        if scales is not None:
            content, new_scales = encode(content, stored.dtype)
            scales.view(-1).index_copy_(0, rows, new_scales)
        as_bytes(stored).view(-1, head_dim).index_copy_(0, rows, as_bytes(content))


def copy_blocks(cache: LayerCache, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy whole blocks; a block is never both source and target of one call."""
    for stored in map(as_bytes, cache.tensors()):
        stored.index_copy_(0, targets, stored.index_select(0, sources))

"""Writes to the paged KV cache."""

from __future__ import annotations

import torch

from kernels.attention import LayerCache
from kernels.reference.cache_quantisation import as_bytes, encode


def cache_rows(slot_mapping: torch.Tensor, num_kv_heads: int, block_size: int) -> torch.Tensor:
    """Return each token's heads as rows of a cache viewed as [rows, head_dim]: [n] -> [n * heads].

    Args:
        slot_mapping: [n] int64, ``block * block_size + offset`` of each token.
        num_kv_heads: of the cache.
        block_size: tokens per block.
    """
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    heads = torch.arange(num_kv_heads, device=slot_mapping.device)
    rows = (block * num_kv_heads).unsqueeze(1) + heads
    return (rows * block_size + offset.unsqueeze(1)).flatten()


def store_kv(
    keys: torch.Tensor, values: torch.Tensor, cache: LayerCache, rows: torch.Tensor
) -> None:
    """Store a step's keys and values, [n, kv_heads, head_dim], in their slots.

    They are encoded, with scales, if the cache holds codes.

    Args:
        keys, values: of the step's tokens; keys are rotated already.
        cache: the layer's blocks, updated in place.
        rows: the result of ``cache_rows`` for the step.
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

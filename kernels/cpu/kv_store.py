"""Queries, and writes into the paged KV cache, by ``native/kv_store.cpp``."""

from __future__ import annotations

import torch

from kernels.attention import LayerCache
from kernels.cpu.bindings import CODE_KINDS, DTYPE_CODES, function, pointer


def norm_rope_store(
    fused: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    cache: LayerCache,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """See ``kernels.reference.fused``."""
    fused = fused.contiguous()
    num_tokens, all_heads, head_dim = fused.shape
    num_kv_heads, block_size = cache.keys.shape[1:3]
    num_heads = all_heads - 2 * num_kv_heads
    query = fused.new_empty((num_tokens, num_heads, head_dim))
    cos, sin = rotation or (None, None)
    arguments = (
        DTYPE_CODES[fused.dtype],
        fused.data_ptr(),
        pointer(norm_weight),
        eps,
        pointer(cos),
        pointer(sin),
        slot_mapping.data_ptr(),
        num_tokens,
        num_heads,
        num_kv_heads,
        cache.block_stride_heads,
        head_dim,
        block_size,
        query.data_ptr(),
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
    )
    if cache.key_scales is None:
        function("quire_norm_rope_store")(*arguments)
    else:
        kind = CODE_KINDS[cache.keys.dtype]
        scales = (pointer(cache.key_scales), pointer(cache.value_scales))
        function("quire_norm_rope_store_codes")(*arguments, kind, *scales)
    return query


def norm_rope(
    query: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """See ``kernels.reference.fused``."""
    query = query.contiguous()
    turned = torch.empty_like(query)
    head_dim = query.shape[-1]
    num_weights = 1 if norm_weight is None else norm_weight.numel() // head_dim
    cos, sin = rotation or (None, None)
    function("quire_norm_rope")(
        *(DTYPE_CODES[query.dtype], query.data_ptr(), pointer(norm_weight), num_weights, eps),
        *(pointer(cos), pointer(sin), *query.shape, turned.data_ptr()),
    )
    return turned


def copy_blocks(cache: LayerCache, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """See ``kernels.reference.kv_store``."""
    for stored in cache.tensors():
        function("quire_copy_blocks")(
            stored.data_ptr(),
            sources.data_ptr(),
            targets.data_ptr(),
            sources.numel(),
            stored[0].nbytes,
            stored.stride(0) * stored.itemsize,
        )

"""Writes to the paged KV cache: a step's keys and values, and copies of whole blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention import LayerCache
from kernels.reference.cache_quantisation import MAX_CODES, MIN_ROW_MAX, as_bytes
from kernels.triton.launch import launch, power_of_2, wait_for_prior_kernels

_SMALLEST: tl.constexpr = tl.constexpr(MIN_ROW_MAX)
_INT8_PEAK: tl.constexpr = tl.constexpr(MAX_CODES[torch.int8])
_HEADS = 8  # of one token, per program
_COPY_TILE = 4096


def norm_rope_store(
    fused: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    cache: LayerCache,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Do everything from the projection to the cache in one launch; see
    ``kernels.reference.fused``.

    Computes in float32 throughout, and rounds once when storing.
    """
    num_tokens, all_heads, head_dim = fused.shape
    num_kv_heads, block_size = cache.keys.shape[1:3]
    num_heads = all_heads - 2 * num_kv_heads
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=fused.dtype, device=fused.device)
    cos, sin = (None, None) if rotation is None else rotation
    launch(
        _norm_rope_store_kernel,
        (num_tokens, -(-all_heads // _HEADS)),
        query,
        as_bytes(cache.keys),
        as_bytes(cache.values),
        cache.key_scales,
        cache.value_scales,
        fused,
        norm_weight,
        cos,
        sin,
        slot_mapping,
        eps,
        fused.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF_DIM=head_dim // 2,
        HALF=power_of_2(head_dim // 2),
        BLOCK_SIZE=block_size,
        HEADS=_HEADS,
        PEAK=0.0 if cache.key_scales is None else MAX_CODES[cache.keys.dtype],
        num_warps=2,
        # Codes are rounded from rounded products, as in the reference.
        enable_fp_fusion=cache.key_scales is None,
    )
    return query


def copy_blocks(cache: LayerCache, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy whole blocks, keys and values in one launch; see ``kernels.reference.kv_store``.

    Scales, if there are any, take another launch.

    Args:
        cache: the layer's blocks, updated in place.
        sources, targets: [m] int64; a block is never both.
    """
    tensors = [as_bytes(stored) for stored in cache.tensors()]
    for first in range(0, len(tensors), 2):
        pair = tensors[first : first + 2]  # latents have no separate values
        size = pair[0][0].numel()
        launch(
            _copy_blocks_kernel,
            (sources.shape[0], len(pair), -(-size // _COPY_TILE)),
            pair[0],
            pair[-1],
            sources,
            targets,
            size,
            TILE=_COPY_TILE,
            num_warps=8,
        )


@triton.jit
def _norm_rope_store_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    fused,
    norm_weight,
    cos,
    sin,
    slot_mapping,
    eps,
    fused_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PEAK: tl.constexpr,
):
    """Some heads of one token, as two halves [HEADS, HALF] that are rotated against each other.

    ``PEAK``: the largest code of the cache's dtype, if it holds codes.
    """
    wait_for_prior_kernels()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF)
    in_dims = (dims < HALF_DIM)[None, :]
    head_dim: tl.constexpr = 2 * HALF_DIM
    rotated_heads: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    is_rotated = heads < rotated_heads
    is_read = (heads < rotated_heads + NUM_KV_HEADS)[:, None] & in_dims

    place = fused + token * fused_stride + heads[:, None] * head_dim + dims[None, :]
    first = tl.load(place, mask=is_read, other=0.0).to(tl.float32)
    second = tl.load(place + HALF_DIM, mask=is_read, other=0.0).to(tl.float32)
    if norm_weight is not None:
        squares = tl.sum(first * first + second * second, axis=1)
        scale = tl.rsqrt(squares / head_dim + eps)[:, None]
        by = norm_weight + heads[:, None] * head_dim + dims[None, :]
        is_normed = is_rotated[:, None] & in_dims
        first_weight = tl.load(by, mask=is_normed, other=0.0).to(tl.float32)
        second_weight = tl.load(by + HALF_DIM, mask=is_normed, other=0.0).to(tl.float32)
        first = tl.where(is_rotated[:, None], first * scale * first_weight, first)
        second = tl.where(is_rotated[:, None], second * scale * second_weight, second)
    if cos is not None:
        angle = token * HALF_DIM + dims
        c = tl.load(cos + angle, mask=dims < HALF_DIM, other=0.0)[None, :]
        s = tl.load(sin + angle, mask=dims < HALF_DIM, other=0.0)[None, :]
        turned = first * c - second * s
        second = tl.where(is_rotated[:, None], second * c + first * s, second)
        first = tl.where(is_rotated[:, None], turned, first)

    is_query = (heads < NUM_HEADS)[:, None] & in_dims
    target = query + (token * NUM_HEADS + heads)[:, None] * head_dim + dims[None, :]
    tl.store(target, first.to(query.dtype.element_ty), mask=is_query)
    tl.store(target + HALF_DIM, second.to(query.dtype.element_ty), mask=is_query)

    slot = tl.load(slot_mapping + token)
    is_stored = is_read & (slot >= 0)
    block = slot // BLOCK_SIZE
    offset = slot - block * BLOCK_SIZE
    kv_heads = (heads - NUM_HEADS) % NUM_KV_HEADS
    rows = (block * NUM_KV_HEADS + kv_heads) * BLOCK_SIZE + offset
    offsets = rows[:, None] * head_dim + dims[None, :]
    if key_scales is not None:
        first, second, scales = _encode(  # pyright: ignore[reportGeneralTypeIssues]
            first, second, PEAK
        )
        is_scaled = (heads < rotated_heads + NUM_KV_HEADS) & (slot >= 0)
        is_key_head = is_scaled & (heads >= NUM_HEADS) & is_rotated
        tl.store(key_scales + rows, scales, mask=is_key_head)
        tl.store(value_scales + rows, scales, mask=is_scaled & (heads >= rotated_heads))
    is_key = is_stored & (heads >= NUM_HEADS)[:, None] & is_rotated[:, None]
    tl.store(keys + offsets, first.to(keys.dtype.element_ty), mask=is_key)
    tl.store(keys + offsets + HALF_DIM, second.to(keys.dtype.element_ty), mask=is_key)
    is_value = is_stored & (heads >= rotated_heads)[:, None]
    tl.store(values + offsets, first.to(values.dtype.element_ty), mask=is_value)
    tl.store(values + offsets + HALF_DIM, second.to(values.dtype.element_ty), mask=is_value)


@triton.jit
def _encode(first, second, PEAK: tl.constexpr):
    """Encode rows in two halves [HEADS, HALF] as bytes; also return the scales [HEADS].

    See ``kernels.reference.cache_quantisation``.
    """
    sizes = tl.maximum(tl.abs(first), tl.abs(second))
    largest = tl.max(tl.where(sizes == sizes, sizes, 0.0), axis=1)
    # Rounded as in the reference: a GPU's own division may be off in the last place.
    peak = tl.full(largest.shape, PEAK, tl.float32)
    inverse = tl.div_rn(peak, tl.maximum(largest, _SMALLEST))
    inverse = tl.where(largest > _SMALLEST, inverse, 0.0)
    inverse = inverse[:, None]
    broken = tl.sum(first * 0.0 + second * 0.0, axis=1)  # nan if anything is nan or infinite
    return (
        _code(first * inverse, PEAK),
        _code(second * inverse, PEAK),
        tl.div_rn(largest, peak) + broken,
    )


@triton.jit
def _code(x, PEAK: tl.constexpr):
    """Return the byte of each value's code, rounded to nearest, ties to even.

    This is done by bit arithmetic: casts to e4m3 differ between devices and the interpreter.
    """
    # A broken row has a nan scale; its codes may be any valid ones.
    x = tl.where(x == x, x, 0.0)
    if PEAK == _INT8_PEAK:
        # Above 2^23 adjacent floats are one apart, so the sum's last bits are the nearest integer.
        return ((x + 12582912.0).to(tl.int32, bitcast=True) & 255).to(tl.uint8)
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are 2^-9 apart, as adjacent floats are above 2^14.
    small = (tl.abs(x) + 24576.0).to(tl.int32, bitcast=True) & 15
    code = tl.where(size < (121 << 23), small, normal) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8)


@triton.jit
def _copy_blocks_kernel(keys, values, sources, targets, size, TILE: tl.constexpr):
    wait_for_prior_kernels()
    at = tl.program_id(2) * TILE + tl.arange(0, TILE)
    source = tl.load(sources + tl.program_id(0)).to(tl.int64) * size
    target = tl.load(targets + tl.program_id(0)).to(tl.int64) * size
    if tl.program_id(1) == 0:
        content = tl.load(keys + source + at, mask=at < size)
        tl.store(keys + target + at, content, mask=at < size)
    else:
        content = tl.load(values + source + at, mask=at < size)
        tl.store(values + target + at, content, mask=at < size)

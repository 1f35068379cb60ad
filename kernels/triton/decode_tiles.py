"""Tiles of keys and values of single queries, for ``decode.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.launch import prefetch
from kernels.triton.tiles import dot, dot_add, load_rows, online_softmax, rows_of_tile, tanh

_LINE: tl.constexpr = tl.constexpr(64)  # numbers of two bytes in a cache line


@triton.jit
def prefetch_tile(
    keys,
    values,
    table,
    begin,
    is_used,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Request a tile of keys and values."""
    first_row, rows = rows_of_tile(  # pyright: ignore[reportGeneralTypeIssues]
        table, begin, is_used, kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE
    )
    rows = tl.where(is_used, rows, tl.min(rows))
    for dim in tl.static_range(0, HEAD_DIM, _LINE):
        offsets = (first_row + rows) * HEAD_DIM + dim
        prefetch(keys + offsets)
        prefetch(values + offsets)


@triton.jit
def load_tile(
    keys,
    values,
    key_scales,
    value_scales,
    table,
    begin,
    is_read,
    kv_head,
    DTYPE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return keys and values [TILE, DIM], 0 where ``is_read`` is false, and their scales [TILE],
    which are 1 if there are none."""
    k, key_scale = _load_part(  # pyright: ignore[reportGeneralTypeIssues]
        *(keys, key_scales, table, begin, is_read, kv_head, DTYPE),
        *(NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE),
    )
    v, value_scale = _load_part(
        *(values, value_scales, table, begin, is_read, kv_head, DTYPE),
        *(NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE),
    )
    return k, v, key_scale, value_scale


@triton.jit
def _load_part(
    stored,
    scales,
    table,
    begin,
    is_read,
    kv_head,
    DTYPE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return keys or values, as ``load_tile`` does."""
    dims = tl.arange(0, DIM)
    first_row, rows = rows_of_tile(  # pyright: ignore[reportGeneralTypeIssues]
        table, begin, is_read, kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE
    )
    offsets = rows[:, None] * HEAD_DIM + dims[None, :]
    is_number = is_read[:, None] & (dims < HEAD_DIM)[None, :]
    x = load_rows(stored + first_row * HEAD_DIM + offsets, is_number, DTYPE)
    if scales is None:
        return x, tl.full([TILE], 1.0, tl.float32)
    else:
        return x, tl.load(scales + first_row + rows, mask=is_read, other=0.0)


@triton.jit
def attend_unit(
    q,
    k,  # [TILE, DIM], read ahead but for the step's tokens
    v,
    key_scale,  # [TILE] likewise
    value_scale,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    begin,
    is_seen,
    past,
    kv_head,
    scale,
    softcap,
    scale_in_cap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Attend to one tile of slots; return the mean value, and log2 of its weight."""
    slots = begin + tl.arange(0, TILE)
    if begin + TILE > past:
        is_new = is_seen & (slots >= past)
        new_k, new_v, new_key_scale, new_value_scale = load_tile(  # pyright: ignore[reportGeneralTypeIssues]
            *(keys, values, key_scales, value_scales, table, begin, is_new, kv_head, q.dtype),
            *(NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE),
        )
        k, v = tl.where(is_new[:, None], new_k, k), tl.where(is_new[:, None], new_v, v)
        key_scale = tl.where(is_new, new_key_scale, key_scale)
        value_scale = tl.where(is_new, new_value_scale, value_scale)
    top, total, acc = _nothing_seen(q)  # pyright: ignore[reportGeneralTypeIssues]
    weights, _, top, total = _weights_of_tile(
        *(q, k, key_scale, is_seen, top, total, scale, softcap, scale_in_cap),
        *(key_scales is not None, HAS_SOFTCAP, True),
    )
    if value_scales is not None:
        weights *= value_scale[None, :]
    acc = dot_add(weights.to(v.dtype), v, acc)
    return _mean_of_values(top, total, acc)


@triton.jit
def attend_part(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    begin,
    end,
    seq_len,
    kv_head,
    scale,
    softcap,
    scale_in_cap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Attend to slots [begin, end); return the mean value, and log2 of its weight."""
    top, total, acc = _nothing_seen(q)  # pyright: ignore[reportGeneralTypeIssues]
    if WINDOW > 0:
        begin = tl.maximum(begin, (seq_len - WINDOW) // TILE * TILE)
    for tile in range(begin, end, TILE):
        slots = tile + tl.arange(0, TILE)
        # Slots past the end are unowned and may hold anything: they are not read.
        is_seen = slots < seq_len
        if WINDOW > 0:
            is_seen = is_seen & (slots >= seq_len - WINDOW)
        k, key_scale = _load_part(
            *(keys, key_scales, table, tile, is_seen, kv_head, q.dtype),
            *(NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE),
        )
        weights, shrink, top, total = _weights_of_tile(
            *(q, k, key_scale, is_seen, top, total, scale, softcap, scale_in_cap),
            *(key_scales is not None, HAS_SOFTCAP, False),
        )
        v, value_scale = _load_part(
            *(values, value_scales, table, tile, is_seen, kv_head, q.dtype),
            *(NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE),
        )
        if value_scales is not None:
            weights *= value_scale[None, :]
        acc = dot_add(weights.to(v.dtype), v, acc * shrink[:, None])
    return _mean_of_values(top, total, acc)


@triton.jit
def _nothing_seen(q):
    """Return the top, total and sums of queries [rows, DIM] that have seen no key."""
    top = tl.full([q.shape[0]], -float("inf"), tl.float32)
    return top, tl.zeros([q.shape[0]], tl.float32), tl.zeros(q.shape, tl.float32)


@triton.jit
def _weights_of_tile(
    q,
    k,
    key_scale,
    is_seen,
    top,
    total,
    scale,
    softcap,
    scale_in_cap,
    HAS_SCALES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MAY_SEE_NONE: tl.constexpr,
):
    """Return what ``online_softmax`` does, of the scores of a tile of keys."""
    scores = dot(q, tl.trans(k))
    if HAS_SCALES:
        scores *= key_scale[None, :]
    if HAS_SOFTCAP:
        scores = tanh(scores * scale_in_cap)
    scores = tl.where(is_seen[None, :], scores, -float("inf"))
    return online_softmax(scores, softcap if HAS_SOFTCAP else scale, top, total, MAY_SEE_NONE)


@triton.jit
def _mean_of_values(top, total, acc):
    """Return the mean values, and log2 of their weights."""
    # A row of length 0 is padding: its mean is 0.
    total = tl.where(total > 0.0, total, 1.0)
    return acc / total[:, None], top + tl.log2(total)

"""Batch-invariant paged attention: a query's result has the same bits alone and in any chunk.

    slots of a sequence:  | run 0 | run 1 | run 2 | ...      SPLIT_SIZE slots each

    several queries: a program iterates over the runs, merges each with those before
    a single query:  a program for each run; another kernel merges them in that order

The former is in ``invariant_prefill.py``, the latter in ``invariant_decode.py``; what both share is
here.

A query's result is therefore computed in the same way in both cases, and split by its own
position only: the weights and sums of each run, from products of one shape whose rows are summed
independently, and then the runs merged in order. A run without anything for a query, before its
window or after its position, has its maximum at -inf: merging it multiplies by 2^0 and adds 0. It
makes no difference whether tiles of keys within a run are skipped or masked. What remains is the
compiler's freedom to fuse a product with the following sum, which rounds once less, in one kernel
and not in another; it is disabled (``enable_fp_fusion``).

A decode step is as parallel as in ``decode.py``, by splits of a fixed size instead of a fixed count
(Flash-Decoding, Dao et al. 2023). The cost is rows: the matrix units' products have 64, where the
heads that share a KV head would fill 16; and where one program iterates over all runs, it needs
registers for the previous ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention import LayerAttention, LayerCache
from kernels.triton.launch import dot_width, fits
from kernels.triton.tiles import LOG2_E, dot, dot_add, load_rows, online_softmax, rows_of_tile, tanh
from kernels.triton.work import TILE_ROWS

GROUP_ROWS = 64  # of a product of one warp group
_MAX_SUMS = 256  # of a value's numbers per program


class HeadShape(NamedTuple):
    """Tile parameters for one kind of heads, shared so that all kernels sum alike."""

    dim: int
    sums: int  # a value's numbers per program
    tile: int
    rows: int  # of a chunk's tile
    num_warps: int  # per 64 rows
    num_stages: int


def head_shape(query: torch.Tensor, cache: LayerCache) -> HeadShape:
    """Return the shape for query [num_tokens, num_heads, head_dim] and its layer's blocks."""
    dim, is_coded = dot_width(query.shape[2]), cache.key_scales is not None
    sums = min(dim, _MAX_SUMS)
    if dim <= 128 and query.dtype.itemsize == 2:
        return HeadShape(dim, sums, 64, TILE_ROWS, 4, 5)
    # Codes of the widest heads are widened in registers; float32 need not be fast, but has to fit.
    tile = 16 if dim > sums and is_coded and query.dtype.itemsize == 2 else 32
    stages = 3 if dim <= sums and query.dtype.itemsize == 2 else 2
    # Queries, weights, keys and values, the latter two as they are copied.
    numbers = GROUP_ROWS * (dim + tile) + tile * (dim + sums)
    if not fits(query.device, numbers * query.dtype.itemsize):
        tile = 16
    return HeadShape(dim, sums, tile, GROUP_ROWS, 8, stages)


def score_scales(layer: LayerAttention) -> tuple[float, float, float]:
    """Return the factors of scores, cap and scores below the cap; the first two times log2 e."""
    cap = layer.softcap or 0.0
    return layer.scale * LOG2_E.value, cap * LOG2_E.value, layer.scale / (cap or 1.0)


@triton.jit
def load_queries(rows, heads, is_query, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Load queries [ROWS, DIM]; ``rows`` points to their tokens."""
    dims = tl.arange(0, DIM)
    mask = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(rows + heads[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)


@triton.jit
def attend_tile(
    q,  # [ROWS, DIM]
    keys,
    values,
    key_scales,
    value_scales,
    table,
    begin,  # a multiple of TILE
    seq_len,
    positions,  # [ROWS]
    kv_head,
    value_dims,  # [SUMS]
    scale,
    softcap,
    scale_in_cap,
    acc,  # [ROWS, SUMS]
    top,  # [ROWS]
    total,  # [ROWS]
    IS_MASKED: tl.constexpr,  # else each query attends to all of the tile
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Add one more tile of keys to a run's sums."""
    slots = begin + tl.arange(0, TILE)
    # Slots past the end are unowned and may hold anything: they are not read.
    is_used = slots < seq_len
    if IS_MASKED and WINDOW > 0 and BLOCK_SIZE % TILE != 0:
        # Nor are blocks wholly behind the window, which are somebody else's.
        is_used = is_used & (slots > tl.min(positions, axis=0) - WINDOW)
    first_row, rows = rows_of_tile(  # pyright: ignore[reportGeneralTypeIssues]
        table, begin, is_used, kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE
    )
    dims = tl.arange(0, DIM)
    is_key, is_value = (dims < HEAD_DIM)[None, :], (value_dims < HEAD_DIM)[None, :]
    if IS_MASKED:
        is_key, is_value = is_key & is_used[:, None], is_value & is_used[:, None]
    key_places = rows[:, None] * HEAD_DIM + dims[None, :]
    k = load_rows(keys + first_row * HEAD_DIM + key_places, is_key, q.dtype)
    scores = dot(q, tl.trans(k))
    if key_scales is not None:
        scores *= tl.load(key_scales + first_row + rows, mask=is_used, other=0.0)[None, :]
    if HAS_SOFTCAP:
        scores = tanh(scores * scale_in_cap)
    if IS_MASKED:
        is_seen = slots[None, :] <= positions[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (slots[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, -float("inf"))
    # A query may attend to nothing in a run's first tiles.
    weights, shrink, top, total = online_softmax(
        scores, softcap if HAS_SOFTCAP else scale, top, total, IS_MASKED
    )
    if value_scales is not None:
        weights *= tl.load(value_scales + first_row + rows, mask=is_used, other=0.0)[None, :]
    value_places = rows[:, None] * HEAD_DIM + value_dims[None, :]
    v = load_rows(values + first_row * HEAD_DIM + value_places, is_value, q.dtype)
    return dot_add(weights.to(v.dtype), v, acc * shrink[:, None]), top, total


@triton.jit
def merge_factors(whole_top, top):
    """Return the factors that merge the runs so far with another, and the common maximum."""
    new_top = tl.maximum(whole_top, top)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    return tl.exp2(whole_top - base), tl.exp2(top - base), new_top


@triton.jit
def sink_weight(sinks, heads, is_head, top):
    """Return the weight of each query's sink, in the unit of its other weights."""
    return tl.exp2(tl.load(sinks + heads, mask=is_head, other=0.0) * LOG2_E - top)

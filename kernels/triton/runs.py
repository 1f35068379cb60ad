"""Batch-invariant paged attention: a query's result has the same bits alone and in any chunk.

    slots of a sequence:  | run 0 | run 1 | run 2 | ...      SPLIT_SIZE slots each

    several queries: a program walks through the runs, joins each to those before
    a single query:  a program for a run; another kernel joins them in that order

The first are in ``invariant_prefill.py``, the second in ``invariant_decode.py``; here is what both
do alike.

So what a query's result is made of is the same whichever way it goes, and cut by its own position
alone: the weights and sums of each run by themselves, from products of one shape each row of which
is summed by itself, and those of the runs joined one after the other. A run that holds nothing for
a query, before its window or after its position, has its maximum at -inf: joining it multiplies by
2^0 and adds 0. Tiles of keys within a run are passed over or masked, which is the same. What is
left are the compiler's liberties: it may fuse a product into the sum behind it, which rounds once
less, in one kernel and not in another, and so it is forbidden to (``enable_fp_fusion``).

A decode step is as parallel as ``decode.py`` makes it, by splits of a fixed size and not of a fixed
count (Flash-Decoding, Dao et al. 2023). It costs rows: the 64 of the matrix units' products, where
the heads that share a KV head would fill 16; and where one program walks through all runs,
registers for those before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention import LayerAttention, LayerCache
from kernels.triton.launch import dot_width
from kernels.triton.plan import TILE_ROWS
from kernels.triton.tiles import LOG2_E, dot, dot_add, load_rows, rows_of_tile, tanh, weigh

GROUP_ROWS = 64  # of a product: one warp group's
_MOST_SUMS = 256  # of a value's numbers in one program


class HeadShape(NamedTuple):
    """How heads of a kind are computed, so that all kernels sum alike."""

    dim: int
    sums: int  # a value's numbers in one program
    tile: int
    rows: int  # of a chunk's tile
    num_warps: int  # for each 64 rows
    num_stages: int


def head_shape(query: torch.Tensor, cache: LayerCache) -> HeadShape:
    """Of query [num_tokens, num_heads, head_dim] and its layer's blocks."""
    dim, is_coded = dot_width(query.shape[2]), cache.key_scales is not None
    sums = min(dim, _MOST_SUMS)
    if query.dtype.itemsize > 2:  # of which nobody expects speed: it has to fit
        return HeadShape(dim, sums, 32, GROUP_ROWS, 8, 2)
    if dim > sums and is_coded:  # which are widened in registers
        return HeadShape(dim, sums, 16, GROUP_ROWS, 8, 2)
    if dim <= 128:
        return HeadShape(dim, sums, 64, TILE_ROWS, 4, 5)
    return HeadShape(dim, sums, 32, GROUP_ROWS, 8, 3 if dim <= sums else 2)


def score_scales(layer: LayerAttention) -> tuple[float, float, float]:
    """Of scores, a cap, and scores below the cap; the first two times log2 e."""
    cap = layer.softcap or 0.0
    return layer.scale * LOG2_E.value, cap * LOG2_E.value, layer.scale / (cap or 1.0)


@triton.jit
def load_queries(rows, heads, is_query, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """[ROWS, DIM]; ``rows`` points to their tokens."""
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
    IS_MASKED: tl.constexpr,  # or each query sees all of the tile
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """A run's sums with one more tile of keys."""
    slots = begin + tl.arange(0, TILE)
    # What lies past the end belongs to nobody and may be anything: it is not read.
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
    # A query may see nothing of a run's first tiles.
    weights, shrink, top, total = weigh(
        scores, softcap if HAS_SOFTCAP else scale, top, total, IS_MASKED
    )
    if value_scales is not None:
        weights *= tl.load(value_scales + first_row + rows, mask=is_used, other=0.0)[None, :]
    value_places = rows[:, None] * HEAD_DIM + value_dims[None, :]
    v = load_rows(values + first_row * HEAD_DIM + value_places, is_value, q.dtype)
    return dot_add(weights.to(v.dtype), v, acc * shrink[:, None]), top, total


@triton.jit
def shares_of_runs(whole_top, top):
    """What the runs so far and one more are multiplied by to be joined, and their maximum."""
    new_top = tl.maximum(whole_top, top)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    return tl.exp2(whole_top - base), tl.exp2(top - base), new_top


@triton.jit
def weight_of_sink(sinks, heads, is_head, top):
    """Of each query's sink, as a share of what its weights are shares of."""
    return tl.exp2(tl.load(sinks + heads, mask=is_head, other=0.0) * LOG2_E - top)

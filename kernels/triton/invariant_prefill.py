"""Batch-invariant attention of chunks: each query tile iterates over its runs
(``invariant_attention.py``)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention import LayerAttention, LayerCache
from kernels.triton.invariant_attention import (
    GROUP_ROWS,
    attend_tile,
    head_shape,
    load_queries,
    merge_factors,
    score_scales,
    sink_weight,
)
from kernels.triton.launch import launch, wait_for_prior_kernels
from kernels.triton.plan import describe_tile
from kernels.triton.tiles import part_of_keys, readable
from kernels.triton.work import SPLIT_SIZE, TILE_ROWS, AttentionPlan


def invariant_prefill(
    plan: AttentionPlan,
    layer: LayerAttention,
    query: torch.Tensor,
    cache: LayerCache,
    output: torch.Tensor,
) -> None:
    """Attend for the rows with several queries, and write their results to ``output``.

    Args:
        plan: of the step.
        layer: scale, window, cap and sinks; its queries do not look ahead.
        query: [num_tokens, num_heads, head_dim], heads contiguous.
        cache: the layer's blocks.
        output: [num_tokens, num_heads, head_dim] contiguous; a row of length 0 is 0.
    """
    assert plan.tiles is not None
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = cache.keys.shape[1]
    tiles, tables = plan.tiles, plan.geometry.tables
    shape = head_shape(query, cache)
    launch(
        _runs_of_tile_kernel,
        (tiles.capacity * num_kv_heads, TILE_ROWS // shape.rows, shape.dim // shape.sums),
        output,
        query,
        readable(cache.keys),
        readable(cache.values),
        *cache[2:4],
        tiles.count,
        tiles.records,
        tables,
        layer.sinks,
        query.stride(0),
        tables.stride(0),
        *score_scales(layer),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        QUERIES=TILE_ROWS // (num_heads // num_kv_heads),
        HEAD_DIM=head_dim,
        DIM=shape.dim,
        SUMS=shape.sums,
        BLOCK_SIZE=cache.keys.shape[2],
        RUN=SPLIT_SIZE,
        ROWS=shape.rows,
        TILE=shape.tile,
        WINDOW=layer.window or 0,
        HAS_SOFTCAP=layer.softcap is not None,
        num_warps=shape.num_warps * shape.rows // GROUP_ROWS,
        num_stages=shape.num_stages,
        enable_fp_fusion=False,
    )


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["num_tiles", "tables"],
)
def _runs_of_tile_kernel(
    output,
    query,
    keys,
    values,
    key_scales,  # None unless the cache is quantised
    value_scales,
    num_tiles,
    tiles,
    tables,
    sinks,
    query_stride,
    table_stride,
    scale,  # times log2 e
    softcap,  # times log2 e
    scale_in_cap,  # scale / softcap
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """``ROWS`` rows of a query tile of one KV head, and ``SUMS`` elements of each value."""
    wait_for_prior_kernels()
    tile, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    first_of_tile, num_queries, begin, seq_len, line = describe_tile(tile, tiles)
    # The grid has an upper bound of the tiles.
    if tile >= tl.load(num_tiles):
        return
    past = seq_len - num_queries
    first_place = tl.program_id(1) * ROWS
    first_query = first_of_tile + first_place // GROUP
    if first_query >= num_queries:
        return
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP

    place = first_place + tl.arange(0, ROWS)
    local = first_of_tile + place // GROUP
    heads = kv_head * GROUP + place % GROUP
    is_query = (place < QUERIES * GROUP) & (local < num_queries)
    tokens = (begin + local).to(tl.int64)
    q = load_queries(query + (tokens * query_stride)[:, None], heads, is_query, HEAD_DIM, DIM)
    # Rows without a query use the last one's position, which keeps their softmax finite.
    last_query = tl.minimum(first_of_tile + (first_place + ROWS - 1) // GROUP + 1, num_queries) - 1
    positions = past + tl.minimum(local, last_query)
    end = past + last_query + 1
    seen_by_all = (past + first_query + 1) // TILE * TILE  # where the diagonal begins
    lowest, unmasked = 0, 0
    if WINDOW > 0:
        lowest = tl.maximum(past + first_query - WINDOW + 1, 0) // TILE * TILE
        unmasked = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), TILE) * TILE, end)
        unmasked = tl.maximum(unmasked, 0)  # padding ends before position 0
    seen_by_all = tl.maximum(seen_by_all, unmasked)

    table = tables + line.to(tl.int64) * table_stride
    value_dims = tl.program_id(2) * SUMS + tl.arange(0, SUMS)
    # Of the current run, and of those before.
    acc = tl.zeros([ROWS, SUMS], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    whole, whole_top, whole_total = acc, top, total
    # With several loops the products of the widest heads would be serialised (ptxas).
    FIRST_PART: tl.constexpr = 2 if SUMS < DIM else 0 if WINDOW > 0 else 1
    for part in tl.static_range(FIRST_PART, 3):
        part_begin, part_end = part_of_keys(lowest, unmasked, seen_by_all, end, part, SUMS < DIM)
        for slot in range(part_begin, part_end, TILE):
            if slot % RUN == 0:
                kept, added, whole_top = merge_factors(whole_top, top)
                whole = whole * kept[:, None] + acc * added[:, None]
                whole_total = whole_total * kept + total * added
                acc = tl.zeros([ROWS, SUMS], tl.float32)
                top = tl.full([ROWS], -float("inf"), tl.float32)
                total = tl.zeros([ROWS], tl.float32)
            acc, top, total = attend_tile(
                *(q, keys, values, key_scales, value_scales, table, slot),
                *(seq_len, positions, kv_head, value_dims),
                *(scale, softcap, scale_in_cap, acc, top, total, part != 1),
                *(NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE, WINDOW, HAS_SOFTCAP),
            )
    kept, added, whole_top = merge_factors(whole_top, top)
    whole = whole * kept[:, None] + acc * added[:, None]
    whole_total = whole_total * kept + total * added
    if sinks is not None:
        whole_total += sink_weight(sinks, heads, is_query, whole_top)
    mean = whole / tl.where(whole_total > 0.0, whole_total, 1.0)[:, None]
    target = output + (tokens * num_heads + heads)[:, None] * HEAD_DIM + value_dims[None, :]
    is_made = is_query[:, None] & (value_dims < HEAD_DIM)[None, :]
    tl.store(target, mean.to(output.dtype.element_ty), mask=is_made)

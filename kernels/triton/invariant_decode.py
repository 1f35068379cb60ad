"""Batch-invariant attention of single queries: parallel runs that are then merged
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
from kernels.triton.launch import launch, persistent_programs, power_of_2, wait_for_prior_kernels
from kernels.triton.plan import first_split_of, locate_split
from kernels.triton.tiles import LOG2_E, readable
from kernels.triton.work import SPLIT_SIZE, AttentionPlan

_MERGE_UNROLL = 8


def invariant_decode(
    plan: AttentionPlan,
    layer: LayerAttention,
    query: torch.Tensor,
    cache: LayerCache,
    output: torch.Tensor,
) -> None:
    """Attend for the rows with a single query, and write their results to ``output``.

    Args:
        plan: of the step.
        layer: scale, window, cap and sinks; its queries do not look ahead.
        query: [num_tokens, num_heads, head_dim], heads contiguous.
        cache: the layer's blocks.
        output: [num_tokens, num_heads, head_dim] contiguous; a row of length 0 is 0.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = cache.keys.shape[1]
    group = num_heads // num_kv_heads
    splits, (query_start, seq_lens, lines, tables, _) = plan.splits[layer.window], plan.geometry
    capacity, shape = splits.capacity, head_shape(query, cache)
    sums = torch.empty((capacity, num_heads, head_dim), dtype=torch.float32, device=query.device)
    tops, totals = torch.empty((2, capacity, num_heads), dtype=torch.float32, device=query.device)
    head_tiles = -(-group // GROUP_ROWS)
    programs = persistent_programs(query.device, 2 if shape.num_warps == 4 else 1)
    launch(
        _run_kernel,
        (min(capacity * num_kv_heads * head_tiles, programs), shape.dim // shape.sums),
        output,
        sums,
        tops,
        totals,
        query,
        readable(cache.keys),
        readable(cache.values),
        *cache[2:4],
        query_start,
        seq_lens,
        lines,
        tables,
        splits.starts,
        splits.rows,
        layer.sinks,
        seq_lens.shape[0],
        query.stride(0),
        tables.stride(0),
        *score_scales(layer),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_TILES=head_tiles,
        HEAD_DIM=head_dim,
        DIM=shape.dim,
        SUMS=shape.sums,
        BLOCK_SIZE=cache.keys.shape[2],
        RUN=SPLIT_SIZE,
        ROWS=GROUP_ROWS,
        TILE=shape.tile,
        WINDOW=layer.window or 0,
        HAS_SOFTCAP=layer.softcap is not None,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        enable_fp_fusion=False,
    )
    if plan.merges:
        launch(
            _merge_runs_kernel,
            (seq_lens.shape[0], num_heads),
            output,
            sums,
            tops,
            totals,
            query_start,
            splits.starts,
            layer.sinks,
            HEAD_DIM=head_dim,
            DIM=power_of_2(head_dim),
            AT_ONCE=_MERGE_UNROLL,
            num_warps=4,
            enable_fp_fusion=False,
        )


# Arguments that change from step to step are not specialised on: see plan.py.
@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=[
        "query_start",
        "seq_lens",
        "lines",
        "tables",
        "split_starts",
        "split_rows",
    ],
)
def _run_kernel(
    output,
    sums,  # [capacity, heads, head_dim] float32, weighted sums of values of a run
    tops,  # [capacity, heads] float32, log2 of the unit of a run's weights
    totals,  # [capacity, heads] float32, of its weights
    query,
    keys,
    values,
    key_scales,  # None unless the cache is quantised
    value_scales,
    query_start,
    seq_lens,
    lines,  # of the tables
    tables,
    split_starts,
    split_rows,
    sinks,
    num_rows,
    query_stride,
    table_stride,
    scale,  # times log2 e
    softcap,  # times log2 e
    scale_in_cap,  # scale / softcap
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_TILES: tl.constexpr,
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
    """Process work items until none is left: a run of a single query, for one KV head."""
    wait_for_prior_kernels()
    OF_A_SPLIT: tl.constexpr = NUM_KV_HEADS * HEAD_TILES
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    num_items = tl.load(split_starts + num_rows) * OF_A_SPLIT
    value_dims = tl.program_id(1) * SUMS + tl.arange(0, SUMS)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        split = item // OF_A_SPLIT
        kv_head = (item - split * OF_A_SPLIT) // HEAD_TILES
        row, run, num_splits = locate_split(  # pyright: ignore[reportGeneralTypeIssues]
            split, split_starts, split_rows
        )
        seq_len = tl.load(seq_lens + row)
        begin = (run + first_split_of(seq_len, WINDOW, RUN)) * RUN
        end = tl.minimum(begin + RUN, seq_len)
        if WINDOW > 0:
            begin = tl.maximum(begin, (seq_len - WINDOW) // TILE * TILE)
        in_group = item % HEAD_TILES * ROWS + tl.arange(0, ROWS)
        is_head = in_group < GROUP
        heads = kv_head * GROUP + in_group
        token = tl.load(query_start + row).to(tl.int64)
        table = tables + tl.load(lines + row).to(tl.int64) * table_stride
        q = load_queries(query + token * query_stride, heads, is_head, HEAD_DIM, DIM)
        acc = tl.zeros([ROWS, SUMS], tl.float32)
        top = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for tile in range(begin, end, TILE):
            acc, top, total = attend_tile(
                *(q, keys, values, key_scales, value_scales, table, tile),
                *(seq_len, heads * 0 + seq_len - 1, kv_head, value_dims),
                *(scale, softcap, scale_in_cap, acc, top, total, True),
                *(NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE, WINDOW, HAS_SOFTCAP),
            )
        offsets = heads[:, None] * HEAD_DIM + value_dims[None, :]
        is_made = is_head[:, None] & (value_dims < HEAD_DIM)[None, :]
        if num_splits == 1:
            if sinks is not None:
                total += sink_weight(sinks, heads, is_head, top)
            mean = acc / tl.where(total > 0.0, total, 1.0)[:, None]
            place = output + token * num_heads * HEAD_DIM + offsets
            tl.store(place, mean.to(output.dtype.element_ty), mask=is_made)
        else:
            at = split.to(tl.int64) * num_heads
            tl.store(sums + at * HEAD_DIM + offsets, acc, mask=is_made)
            tl.store(tops + at + heads, top, mask=is_head)
            tl.store(totals + at + heads, total, mask=is_head)


@triton.jit(do_not_specialize_on_alignment=["query_start", "split_starts"])
def _merge_runs_kernel(
    output,
    sums,
    tops,
    totals,
    query_start,
    split_starts,
    sinks,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Merge one head of one row: its runs in order; a single run is final already."""
    wait_for_prior_kernels()
    row, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    first, end = tl.load(split_starts + row), tl.load(split_starts + row + 1)
    if end - first <= 1:
        return
    dims = tl.arange(0, DIM)
    in_head = dims < HEAD_DIM
    whole = tl.zeros([DIM], tl.float32)
    whole_top = tl.full([], -float("inf"), tl.float32)
    whole_total = tl.full([], 0.0, tl.float32)
    at = first.to(tl.int64) * num_heads + head
    # Unrolled, so that the loads of several runs overlap.
    for _ in tl.range(first, end, loop_unroll_factor=AT_ONCE):
        acc = tl.load(sums + at * HEAD_DIM + dims, mask=in_head, other=0.0)
        top, total = tl.load(tops + at), tl.load(totals + at)
        kept, added, whole_top = merge_factors(whole_top, top)
        whole = whole * kept + acc * added
        whole_total = whole_total * kept + total * added
        at += num_heads
    if sinks is not None:
        whole_total += tl.exp2(tl.load(sinks + head) * LOG2_E - whole_top)
    token = tl.load(query_start + row).to(tl.int64)
    place = output + (token * num_heads + head) * HEAD_DIM + dims
    tl.store(place, (whole / whole_total).to(output.dtype.element_ty), mask=in_head)

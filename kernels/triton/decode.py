"""Paged attention of single queries: split over the keys, with the heads of a group packed
together.

    seq_lens ─► plan ─► row and part of the row for each work item
                              │
    query, cache ─► split kernel: one item = one KV head x one run of SPLIT_SIZE slots
                              │  output, if a row has one run; else partial results
                        merge kernel ─► output

This is PagedAttention (Kwon et al. 2023) with the split of Flash-Decoding (Dao et al. 2023) and the
online softmax of FlashAttention-2 (Dao 2023). The heads that share a KV head are the rows of one
matrix product, so keys and values are read once for the group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention import LayerAttention, LayerCache
from kernels.triton.launch import (
    dot_width,
    launch,
    persistent_programs,
    power_of_2,
    wait_for_prior_kernels,
)
from kernels.triton.plan import SPLIT_SIZE, AttentionPlan, WorkList, first_split_of, locate_split
from kernels.triton.tiles import LOG2_E, dot, dot_add, load_rows, online_softmax, rows_of_tile, tanh

_TILE = 64
_PROGRAMS = 3  # per multiprocessor; one less for heads over 256
_MERGE_TILE = 16


def decode_attention(
    plan: AttentionPlan,
    layer: LayerAttention,
    query: torch.Tensor,
    cache: LayerCache,
    output: torch.Tensor,
) -> None:
    """Attend for the rows with a single query, and write their results to ``output``.

    Args:
        plan: with splits for ``layer.window``.
        layer: scale, window, cap and sinks.
        query: [num_tokens, num_heads, head_dim], heads contiguous.
        cache: the layer's blocks.
        output: [num_tokens, num_heads, head_dim] contiguous; a row of length 0 is 0, and rows with
            several queries are left unchanged.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = cache.keys.shape[1:3]
    group = num_heads // num_kv_heads
    splits, (query_start, seq_lens, lines, tables, _) = plan.splits[layer.window], plan.geometry
    num_rows, capacity = seq_lens.shape[0], splits.capacity
    partial = torch.empty((capacity, num_heads, head_dim), dtype=torch.float32, device=query.device)
    partial_lse = torch.empty((capacity, num_heads), dtype=torch.float32, device=query.device)
    dim = dot_width(head_dim)
    programs = persistent_programs(query.device, _PROGRAMS - (dim > 256))
    launch(
        _split_kernel,
        (min(capacity * num_kv_heads, programs),),
        output,
        partial,
        partial_lse,
        query,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        query_start,
        seq_lens,
        lines,
        tables,
        splits.starts,
        splits.rows,
        layer.sinks,
        num_rows,
        query.stride(0),
        tables.stride(0),
        layer.scale * LOG2_E.value,
        (layer.softcap or 0.0) * LOG2_E.value,
        layer.scale / (layer.softcap or 1.0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_ROWS=dot_width(group),
        HEAD_DIM=head_dim,
        DIM=dim,
        BLOCK_SIZE=block_size,
        SPLIT_SIZE=SPLIT_SIZE,
        # A tile of the widest heads would not fit in registers, nor one of wide heads' codes.
        TILE=_TILE // 2 if dim > (256 if cache.key_scales is None else 128) else _TILE,
        WINDOW=layer.window or 0,
        HAS_SOFTCAP=layer.softcap is not None,
        num_warps=4,
        num_stages=5 if dim <= 128 else 4,  # half of them for the block numbers
    )
    if plan.merges:
        merge_splits(plan, splits, layer, partial, partial_lse, output)


def merge_splits(
    plan: AttentionPlan,
    splits: WorkList,
    layer: LayerAttention,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Merge rows with several splits, [num_tokens, num_heads, head_dim].

    The inputs are means [capacity, num_heads, head_dim] and the logarithms of their weights, both
    float32.
    """
    num_heads, head_dim = output.shape[1:]
    launch(
        _merge_kernel,
        (plan.geometry.seq_lens.shape[0], num_heads),
        output,
        partial,
        partial_lse,
        plan.geometry.query_start,
        splits.starts,
        layer.sinks,
        HEAD_DIM=head_dim,
        DIM=power_of_2(head_dim),
        TILE=_MERGE_TILE,
        num_warps=4,
    )


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
def _split_kernel(
    output,
    partial,  # [capacity, heads, head_dim] float32, softmax-weighted means of a split
    partial_lse,  # [capacity, heads] float32, log2 of the split's sum of 2^score
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
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Process work items until none is left; the grid is as large as the machine."""
    wait_for_prior_kernels()
    num_items = tl.load(split_starts + num_rows) * NUM_KV_HEADS
    group = tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, DIM)
    in_group = group < GROUP
    in_tile = in_group[:, None] & (dims < HEAD_DIM)[None, :]
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        split = item // NUM_KV_HEADS
        kv_head = item - split * NUM_KV_HEADS
        row, run, num_splits = locate_split(  # pyright: ignore[reportGeneralTypeIssues]
            split, split_starts, split_rows
        )
        seq_len = tl.load(seq_lens + row)
        run += first_split_of(seq_len, WINDOW, SPLIT_SIZE)
        heads = kv_head * GROUP + group
        token = tl.load(query_start + row).to(tl.int64)
        table = tables + tl.load(lines + row).to(tl.int64) * table_stride
        q = tl.load(
            query + token * query_stride + heads[:, None] * HEAD_DIM + dims[None, :],
            mask=in_tile,
            other=0.0,
        )
        mean, lse = _attend_run(
            q,
            keys,
            values,
            key_scales,
            value_scales,
            table,
            run * SPLIT_SIZE,
            seq_len,
            kv_head,
            scale,
            softcap,
            scale_in_cap,
            NUM_KV_HEADS,
            HEAD_DIM,
            DIM,
            GROUP_ROWS,
            BLOCK_SIZE,
            SPLIT_SIZE,
            TILE,
            WINDOW,
            HAS_SOFTCAP,
        )
        num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
        offsets = heads[:, None] * HEAD_DIM + dims[None, :]
        if num_splits == 1:
            if sinks is not None:
                sink = tl.load(sinks + heads, mask=in_group, other=0.0) * LOG2_E
                mean = mean / (1.0 + tl.exp2(sink - lse))[:, None]
            place = output + token * num_heads * HEAD_DIM + offsets
            tl.store(place, mean.to(output.dtype.element_ty), mask=in_tile)
        else:
            at = split.to(tl.int64)
            tl.store(partial + at * num_heads * HEAD_DIM + offsets, mean, mask=in_tile)
            tl.store(partial_lse + at * num_heads + heads, lse, mask=in_group)


@triton.jit
def _attend_run(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    begin,
    seq_len,
    kv_head,
    scale,
    softcap,
    scale_in_cap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Return the mean value of slots [begin, begin + SPLIT_SIZE), and log2 of its weight."""
    dims = tl.arange(0, DIM)
    top = tl.full([GROUP_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, DIM], tl.float32)
    first, end = begin, tl.minimum(begin + SPLIT_SIZE, seq_len)
    if WINDOW > 0:
        first = tl.maximum(begin, (seq_len - WINDOW) // TILE * TILE)
    for tile in range(first, end, TILE):
        slots = tile + tl.arange(0, TILE)
        is_seen = slots < seq_len
        if WINDOW > 0:
            is_seen = is_seen & (slots >= seq_len - WINDOW)
        first_row, rows = rows_of_tile(
            table, tile, is_seen, kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE
        )
        offsets = rows[:, None] * HEAD_DIM + dims[None, :]
        # Slots past the end are unowned and may hold anything: they are not read.
        is_read = is_seen[:, None] & (dims < HEAD_DIM)[None, :]
        k = load_rows(keys + first_row * HEAD_DIM + offsets, is_read, q.dtype)
        scores = dot(q, tl.trans(k))
        if key_scales is not None:
            scores *= tl.load(key_scales + first_row + rows, mask=is_seen, other=0.0)[None, :]
        if HAS_SOFTCAP:
            scores = tanh(scores * scale_in_cap)
        scores = tl.where(is_seen[None, :], scores, -float("inf"))
        weights, shrink, top, total = online_softmax(
            scores, softcap if HAS_SOFTCAP else scale, top, total, False
        )
        if value_scales is not None:
            weights *= tl.load(value_scales + first_row + rows, mask=is_seen, other=0.0)[None, :]
        v = load_rows(values + first_row * HEAD_DIM + offsets, is_read, q.dtype)
        acc = dot_add(weights.to(v.dtype), v, acc * shrink[:, None])
    # A row of length 0 is padding: its mean is 0.
    total = tl.where(total > 0.0, total, 1.0)
    return acc / total[:, None], top + tl.log2(total)


@triton.jit(do_not_specialize_on_alignment=["query_start", "split_starts"])
def _merge_kernel(
    output,
    partial,
    partial_lse,
    query_start,
    split_starts,
    sinks,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Merge one head of one row: the weighted mean of its splits, if there are several."""
    wait_for_prior_kernels()
    row, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    begin, end = tl.load(split_starts + row), tl.load(split_starts + row + 1)
    if end - begin <= 1:
        return
    dims = tl.arange(0, DIM)
    top = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([DIM], tl.float32)
    for first in range(begin, end, TILE):
        splits = first + tl.arange(0, TILE).to(tl.int64)
        is_used = splits < end
        places = splits * num_heads + head
        lse = tl.load(partial_lse + places, mask=is_used, other=-float("inf"))
        means = tl.load(
            partial + places[:, None] * HEAD_DIM + dims[None, :],
            mask=is_used[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        weights = tl.exp2(lse - new_top)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=0)
        acc = acc * shrink + tl.sum(means * weights[:, None], axis=0)
        top = new_top
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head) * LOG2_E - top)
    mean = acc / total
    token = tl.load(query_start + row).to(tl.int64)
    place = output + (token * num_heads + head) * HEAD_DIM + dims
    tl.store(place, mean.to(output.dtype.element_ty), mask=dims < HEAD_DIM)

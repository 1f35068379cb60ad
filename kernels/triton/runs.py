"""Batch-invariant paged attention: a query's result has the same bits alone and in any chunk.

    slots of a sequence:  | run 0 | run 1 | run 2 | ...      SPLIT_SIZE slots each

    several queries ─► tile kernel: a program walks through all runs, joins each to those before
    a single query  ─► run kernel: a program for a run ─► merge kernel: joins them in that order

So what a query's result is made of is the same whichever way it goes, and cut by its own position
alone: the weights and sums of each run by themselves, from products of one shape each row of which
is summed by itself, and those of the runs joined one after the other. A run that holds nothing for
a query, before its window or after its position, has its maximum at -inf: joining it multiplies by
2^0 and adds 0. Tiles of keys within a run are passed over or masked, which is the same. What is
left are the compiler's liberties: it may fuse a product into the sum behind it, which rounds once
less, in one kernel and not in another, and so it is forbidden to (``enable_fp_fusion``).

A decode step is as parallel as ``decode.py`` makes it, by splits of a fixed size and not of a fixed
count (Flash-Decoding, Dao et al. 2023). It costs rows: the 64 of the matrix units' products, where
the heads that share a KV head would fill 16; and in the tile kernel registers, for the runs before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention import LayerAttention, LayerCache
from kernels.triton.launch import await_turn, dot_width, launch, persistent_programs, power_of_2
from kernels.triton.plan import SPLIT_SIZE, TILE_ROWS, AttentionPlan, first_split_of, place_of
from kernels.triton.tiles import LOG2_E, dot, dot_add, load_rows, rows_of_tile, tanh, weigh

_ROWS = 64  # of a product: one warp group's
_MOST_SUMS = 256  # of a value's numbers in one program
_JOINED_AT_ONCE = 8


class _Shape(NamedTuple):
    """How heads of a kind are computed, so that both kernels sum alike."""

    dim: int
    sums: int  # a value's numbers in one program
    tile: int
    rows: int  # of the tile kernel
    num_warps: int  # for each 64 rows
    num_stages: int


def _shape_of(query: torch.Tensor, cache: LayerCache) -> _Shape:
    dim, is_coded = dot_width(query.shape[2]), cache.key_scales is not None
    sums = min(dim, _MOST_SUMS)
    if query.dtype.itemsize > 2:  # of which nobody expects speed: it has to fit
        return _Shape(dim, sums, 32, _ROWS, 8, 2)
    if dim > sums and is_coded:  # which are widened in registers
        return _Shape(dim, sums, 16, _ROWS, 8, 2)
    if dim <= 128:
        return _Shape(dim, sums, 64, TILE_ROWS, 4, 5)
    return _Shape(dim, sums, 32, _ROWS, 8, 3 if dim <= sums else 2)


def attend_runs(
    plan: AttentionPlan,
    layer: LayerAttention,
    query: torch.Tensor,
    cache: LayerCache,
    output: torch.Tensor,
) -> None:
    """Attend for all rows, and write them into ``output``.

    Args:
        plan: of the step.
        layer: scale, window, cap and sinks; no query of it sees what is behind it.
        query: [num_tokens, num_heads, head_dim], heads contiguous.
        cache: the layer's blocks.
        output: [num_tokens, num_heads, head_dim] contiguous; a row of length 0 is 0.
    """
    if plan.splits:
        _single_queries(plan, layer, query, cache, output)
    if plan.tiles is not None:
        _several_queries(plan, layer, query, cache, output)


def _single_queries(
    plan: AttentionPlan,
    layer: LayerAttention,
    query: torch.Tensor,
    cache: LayerCache,
    output: torch.Tensor,
) -> None:
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = cache.keys.shape[1]
    group = num_heads // num_kv_heads
    splits, (query_start, seq_lens, lines, tables, _) = plan.splits[layer.window], plan.geometry
    capacity, shape = splits.capacity, _shape_of(query, cache)
    sums = torch.empty((capacity, num_heads, head_dim), dtype=torch.float32, device=query.device)
    tops, totals = torch.empty((2, capacity, num_heads), dtype=torch.float32, device=query.device)
    head_tiles = -(-group // _ROWS)
    programs = persistent_programs(query.device, 2 if shape.num_warps == 4 else 1)
    launch(
        _run_kernel,
        (min(capacity * num_kv_heads * head_tiles, programs), shape.dim // shape.sums),
        output,
        sums,
        tops,
        totals,
        query,
        *cache[:4],
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
        *_scales(layer),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_TILES=head_tiles,
        HEAD_DIM=head_dim,
        DIM=shape.dim,
        SUMS=shape.sums,
        BLOCK_SIZE=cache.keys.shape[2],
        RUN=SPLIT_SIZE,
        ROWS=_ROWS,
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
            AT_ONCE=_JOINED_AT_ONCE,
            num_warps=4,
            enable_fp_fusion=False,
        )


def _several_queries(
    plan: AttentionPlan,
    layer: LayerAttention,
    query: torch.Tensor,
    cache: LayerCache,
    output: torch.Tensor,
) -> None:
    assert plan.tiles is not None
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = cache.keys.shape[1]
    tiles, (query_start, seq_lens, lines, tables, _) = plan.tiles, plan.geometry
    shape = _shape_of(query, cache)
    launch(
        _runs_of_tile_kernel,
        (tiles.capacity * num_kv_heads, TILE_ROWS // shape.rows, shape.dim // shape.sums),
        output,
        query,
        *cache[:4],
        query_start,
        seq_lens,
        lines,
        tables,
        tiles.starts,
        tiles.rows,
        layer.sinks,
        seq_lens.shape[0],
        query.stride(0),
        tables.stride(0),
        *_scales(layer),
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
        num_warps=shape.num_warps * shape.rows // _ROWS,
        num_stages=shape.num_stages,
        enable_fp_fusion=False,
    )


def _scales(layer: LayerAttention) -> tuple[float, float, float]:
    """Of scores, a cap, and scores below the cap; the first two times log2 e."""
    cap = layer.softcap or 0.0
    return layer.scale * LOG2_E.value, cap * LOG2_E.value, layer.scale / (cap or 1.0)


# What changes from step to step is not specialised on: see decode.py.
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
    sums,  # [capacity, heads, head_dim] float32, weighted values of a run
    tops,  # [capacity, heads] float32, log2 of what its weights are shares of
    totals,  # [capacity, heads] float32, of its weights
    query,
    keys,
    values,
    key_scales,  # of codes, else None
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
    """Takes work items until none is left: a run of a single query, for one KV head."""
    await_turn()
    OF_A_SPLIT: tl.constexpr = NUM_KV_HEADS * HEAD_TILES
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    num_items = tl.load(split_starts + num_rows) * OF_A_SPLIT
    value_dims = tl.program_id(1) * SUMS + tl.arange(0, SUMS)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        split = item // OF_A_SPLIT
        kv_head = (item - split * OF_A_SPLIT) // HEAD_TILES
        row, run, num_splits = place_of(  # pyright: ignore[reportGeneralTypeIssues]
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
        q = _load_queries(query + token * query_stride, heads, is_head, HEAD_DIM, DIM)
        acc = tl.zeros([ROWS, SUMS], tl.float32)
        top = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for tile in range(begin, end, TILE):
            acc, top, total = _attend_tile(
                *(q, keys, values, key_scales, value_scales, table, tile),
                *(seq_len, heads * 0 + seq_len - 1, kv_head, value_dims),
                *(scale, softcap, scale_in_cap, acc, top, total, True),
                *(NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE, WINDOW, HAS_SOFTCAP),
            )
        offsets = heads[:, None] * HEAD_DIM + value_dims[None, :]
        is_made = is_head[:, None] & (value_dims < HEAD_DIM)[None, :]
        if num_splits == 1:
            if sinks is not None:
                total += _weight_of_sink(sinks, heads, is_head, top)
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
    """One head of one row: its runs, one after the other; done already where there is one."""
    await_turn()
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
    # Unrolled, so that the sums of several runs are on their way together.
    for _ in tl.range(first, end, loop_unroll_factor=AT_ONCE):
        acc = tl.load(sums + at * HEAD_DIM + dims, mask=in_head, other=0.0)
        top, total = tl.load(tops + at), tl.load(totals + at)
        kept, added, whole_top = _shares(whole_top, top)
        whole = whole * kept + acc * added
        whole_total = whole_total * kept + total * added
        at += num_heads
    if sinks is not None:
        whole_total += tl.exp2(tl.load(sinks + head) * LOG2_E - whole_top)
    token = tl.load(query_start + row).to(tl.int64)
    place = output + (token * num_heads + head) * HEAD_DIM + dims
    tl.store(place, (whole / whole_total).to(output.dtype.element_ty), mask=in_head)


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=[
        "query_start",
        "seq_lens",
        "lines",
        "tables",
        "tile_starts",
        "tile_rows",
    ],
)
def _runs_of_tile_kernel(
    output,
    query,
    keys,
    values,
    key_scales,  # of codes, else None
    value_scales,
    query_start,
    seq_lens,
    lines,  # of the tables
    tables,
    tile_starts,
    tile_rows,
    sinks,
    num_rows,
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
    """``ROWS`` rows of a query tile of one KV head, and ``SUMS`` numbers of each value."""
    await_turn()
    tile, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    # The grid is as large as a bound.
    if tile >= tl.load(tile_starts + num_rows):
        return
    row = tl.load(tile_rows + tile)
    begin, seq_len = tl.load(query_start + row), tl.load(seq_lens + row)
    num_queries = tl.load(query_start + row + 1) - begin
    past = seq_len - num_queries
    # A row's last tile has most keys: it is the first to start, or it would end alone.
    first_of_tile = (tl.load(tile_starts + row + 1) - 1 - tile) * QUERIES
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
    q = _load_queries(query + (tokens * query_stride)[:, None], heads, is_query, HEAD_DIM, DIM)
    # Rows that are no query look where the last one does: their softmax stays finite.
    last_query = tl.minimum(first_of_tile + (first_place + ROWS - 1) // GROUP + 1, num_queries) - 1
    positions = past + tl.minimum(local, last_query)
    end = past + last_query + 1
    seen_by_all = (past + first_query + 1) // TILE * TILE  # where the diagonal begins
    lowest, unmasked = 0, 0
    if WINDOW > 0:
        lowest = tl.maximum(past + first_query - WINDOW + 1, 0) // TILE * TILE
        unmasked = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), TILE) * TILE, end)
    seen_by_all = tl.maximum(seen_by_all, unmasked)

    table = tables + tl.load(lines + row).to(tl.int64) * table_stride
    value_dims = tl.program_id(2) * SUMS + tl.arange(0, SUMS)
    # Of a run, and of those before.
    acc = tl.zeros([ROWS, SUMS], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    whole, whole_top, whole_total = acc, top, total
    # With more than one loop the products of the widest heads would wait for each other (ptxas).
    FIRST_PART: tl.constexpr = 2 if SUMS < DIM else 0 if WINDOW > 0 else 1
    for part in tl.static_range(FIRST_PART, 3):
        if SUMS < DIM:
            part_begin, part_end = lowest, end
        elif part == 0:
            part_begin, part_end = lowest, unmasked
        elif part == 1:
            part_begin, part_end = unmasked, seen_by_all
        else:
            part_begin, part_end = seen_by_all, end
        for slot in range(part_begin, part_end, TILE):
            if slot % RUN == 0:
                kept, added, whole_top = _shares(whole_top, top)
                whole = whole * kept[:, None] + acc * added[:, None]
                whole_total = whole_total * kept + total * added
                acc = tl.zeros([ROWS, SUMS], tl.float32)
                top = tl.full([ROWS], -float("inf"), tl.float32)
                total = tl.zeros([ROWS], tl.float32)
            acc, top, total = _attend_tile(
                *(q, keys, values, key_scales, value_scales, table, slot),
                *(seq_len, positions, kv_head, value_dims),
                *(scale, softcap, scale_in_cap, acc, top, total, part != 1),
                *(NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE, WINDOW, HAS_SOFTCAP),
            )
    kept, added, whole_top = _shares(whole_top, top)
    whole = whole * kept[:, None] + acc * added[:, None]
    whole_total = whole_total * kept + total * added
    if sinks is not None:
        whole_total += _weight_of_sink(sinks, heads, is_query, whole_top)
    mean = whole / tl.where(whole_total > 0.0, whole_total, 1.0)[:, None]
    target = output + (tokens * num_heads + heads)[:, None] * HEAD_DIM + value_dims[None, :]
    is_made = is_query[:, None] & (value_dims < HEAD_DIM)[None, :]
    tl.store(target, mean.to(output.dtype.element_ty), mask=is_made)


@triton.jit
def _load_queries(rows, heads, is_query, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """[ROWS, DIM]; ``rows`` points to their tokens."""
    dims = tl.arange(0, DIM)
    mask = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(rows + heads[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _attend_tile(
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
def _shares(whole_top, top):
    """What the runs so far and one more are multiplied by to be joined, and their maximum."""
    new_top = tl.maximum(whole_top, top)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    return tl.exp2(whole_top - base), tl.exp2(top - base), new_top


@triton.jit
def _weight_of_sink(sinks, heads, is_head, top):
    """Of each query's sink, as a share of what its weights are shares of."""
    return tl.exp2(tl.load(sinks + heads, mask=is_head, other=0.0) * LOG2_E - top)

"""Paged attention of single queries: equal shares of all keys, with the heads of a group packed
together.

    rows and heads, one after the other, in units of UNIT slots:

    | row 0, head 0 | row 0, head 1 | row 1, head 0         | row 1, head 1         |
    | program 0 | program 1 | program 2 | program 3 | program 4 | program 5 | prog. 6 |

A program attends to its share, whatever rows it cuts: no multiprocessor has more to do than any
other (the idea is Stream-K's, Osama et al. 2023), and within a row nothing interrupts the reading
of keys. A row that one program has to itself is finished there. The parts of a row that was cut are
merged by the program that finishes last, which an atomic counter tells.

This is PagedAttention (Kwon et al. 2023) with the merge of Flash-Decoding (Dao et al. 2023) and the
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
    prefetch,
    shared_memory_bytes,
    wait_for_prior_kernels,
)
from kernels.triton.merge import finish_part, parts_at_once
from kernels.triton.plan import UNIT, AttentionPlan
from kernels.triton.tiles import LOG2_E, dot, dot_add, load_rows, online_softmax, rows_of_tile, tanh

_TILE = 64
_PROGRAMS = 2  # per multiprocessor
# By its shared memory, which has to hold both. Half of the stages are for block numbers.
_STAGES = ((216 << 10, 7), (150 << 10, 5), (0, 3))
_WIDE_STAGES = 4  # for heads over 128
_SEARCHED: tl.constexpr = tl.constexpr(512)  # rows, at once
_LINE: tl.constexpr = tl.constexpr(64)  # numbers of two bytes in a cache line


def decode_attention(
    plan: AttentionPlan,
    layer: LayerAttention,
    query: torch.Tensor,
    cache: LayerCache,
    output: torch.Tensor,
) -> None:
    """Attend for the rows with a single query, and write their results to ``output``.

    Args:
        plan: with units for ``layer.window``.
        layer: scale, window, cap and sinks.
        query: [num_tokens, num_heads, head_dim], heads contiguous.
        cache: the layer's blocks, in which the queries' own tokens are stored already.
        output: [num_tokens, num_heads, head_dim] contiguous; a row of length 0 is 0, and rows with
            several queries are left unchanged.
    """
    num_heads, head_dim = output.shape[1:]
    num_kv_heads, block_size = cache.keys.shape[1:3]
    group = num_heads // num_kv_heads
    units, (query_start, seq_lens, lines, tables, _) = plan.units[layer.window], plan.geometry
    dim = dot_width(head_dim)
    programs = persistent_programs(query.device, _PROGRAMS)
    programs = min(units.capacity * num_kv_heads, programs)
    # Of its share a program may leave the first row to be merged, and the last.
    parts = torch.empty((2 * programs, group, head_dim), dtype=torch.float32, device=query.device)
    part_lse = torch.empty((2 * programs, group), dtype=torch.float32, device=query.device)
    launch(
        _share_kernel,
        (programs,),
        output,
        parts,
        part_lse,
        units.arrivals,
        query,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        query_start,
        seq_lens,
        lines,
        tables,
        units.starts,
        layer.sinks,
        seq_lens.shape[0],
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
        UNIT=UNIT,
        # A tile of the widest heads would not fit in registers, nor one of wide heads' codes.
        TILE=_TILE // 2 if dim > (256 if cache.key_scales is None else 128) else _TILE,
        WINDOW=layer.window or 0,
        HAS_SOFTCAP=layer.softcap is not None,
        # Keys of a source may be stored in this step.
        READS_AHEAD=not layer.reads_source,
        HEADS=power_of_2(group),
        PARTS=parts_at_once(group, dim),
        num_warps=4,
        num_stages=_WIDE_STAGES if dim > 128 else _num_stages(shared_memory_bytes(query.device)),
    )


def _num_stages(shared_bytes: int) -> int:
    return next(stages for least, stages in _STAGES if shared_bytes >= least)


# Arguments that change from step to step are not specialised on: see plan.py.
@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=[
        "arrivals",
        "query_start",
        "seq_lens",
        "lines",
        "tables",
        "unit_starts",
    ],
)
def _share_kernel(
    output,
    parts,  # [2 * programs, GROUP, HEAD_DIM] float32, softmax-weighted means
    part_lse,  # [2 * programs, GROUP] float32, log2 of a part's sum of 2^score
    arrivals,  # [rows, NUM_KV_HEADS], 0 before and after
    query,
    keys,
    values,
    key_scales,  # None unless the cache is quantised
    value_scales,
    query_start,
    seq_lens,
    lines,  # of the tables
    tables,
    unit_starts,
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
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    READS_AHEAD: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program's share, part by part; the grid is as large as the machine.

    Until it waits for its turn it reads only the plan, which was complete before the first layer,
    and keys and values of earlier steps, which were complete before the plan.
    """
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    total = tl.load(unit_starts + num_rows) * NUM_KV_HEADS
    share = tl.cdiv(total, tl.num_programs(0))
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, total)
    row = _row_of_unit(begin, unit_starts, num_rows, NUM_KV_HEADS)
    row = tl.minimum(row, num_rows - 1)  # an idle program's is past the end
    row_begin, num_units, seq_len, token, line = _read_row(
        row, unit_starts, seq_lens, query_start, lines
    )
    group = tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, DIM)
    in_group = group < GROUP
    in_tile = in_group[:, None] & (dims < HEAD_DIM)[None, :]
    table = tables + line * table_stride
    # A share of one unit is too short for a loop, which would prepare several tiles before the
    # first is used. It is read ahead, but for the newest token.
    READS_UNIT: tl.constexpr = READS_AHEAD and UNIT == TILE
    is_unit = READS_UNIT & (share == 1) & (begin < end)
    kv_head, first = _place_of_unit(
        *(begin - row_begin * NUM_KV_HEADS, tl.maximum(num_units, 1), seq_len, UNIT, WINDOW)
    )
    slots = first + tl.arange(0, TILE)
    if READS_UNIT:
        is_seen = (slots < seq_len) & is_unit
        if WINDOW > 0:
            is_seen = is_seen & (slots >= seq_len - WINDOW)
        k, v, key_scale, value_scale = _load_tile(
            *(keys, values, key_scales, value_scales, table, first),
            *(is_seen & (slots < seq_len - 1), kv_head, query.dtype.element_ty),
            *(NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE),
        )
    if (begin < end) & (not is_unit):
        _prefetch_tile(
            *(keys, values, table, first, slots < seq_len, kv_head),
            *(NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE),
        )
    wait_for_prior_kernels()
    unit = begin
    if READS_UNIT:  # noqa: SIM102 - compiled only if so
        if is_unit:
            heads = kv_head * GROUP + group
            place = query + token * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
            q = tl.load(place, mask=in_tile, other=0.0)
            mean, lse = _attend_unit(
                *(q, k, v, key_scale, value_scale, keys, values, key_scales, value_scales),
                *(table, first, is_seen, seq_len, kv_head, scale, softcap, scale_in_cap),
                *(NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE, HAS_SOFTCAP),
            )
            head_begin = row_begin * NUM_KV_HEADS + kv_head * num_units
            finish_part(
                *(output + token * num_heads * HEAD_DIM, parts, part_lse, arrivals, sinks),
                *(mean, lse, begin, end, begin, share, head_begin, num_units),
                *(row, kv_head, NUM_KV_HEADS, GROUP, HEADS, HEAD_DIM, DIM, PARTS),
            )
            unit = end
    while unit < end:
        kv_head = (unit - row_begin * NUM_KV_HEADS) // num_units
        head_begin = row_begin * NUM_KV_HEADS + kv_head * num_units
        part_end = tl.minimum(head_begin + num_units, end)
        heads = kv_head * GROUP + group
        place = query + token * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
        q = tl.load(place, mask=in_tile, other=0.0)
        # The slots begin with the first unit of the window.
        before = _units_before(seq_len, UNIT, WINDOW) - head_begin
        mean, lse = _attend_part(
            q,
            keys,
            values,
            key_scales,
            value_scales,
            tables + line * table_stride,
            (before + unit) * UNIT,
            tl.minimum((before + part_end) * UNIT, seq_len),
            seq_len,
            kv_head,
            scale,
            softcap,
            scale_in_cap,
            NUM_KV_HEADS,
            HEAD_DIM,
            DIM,
            BLOCK_SIZE,
            TILE,
            WINDOW,
            HAS_SOFTCAP,
        )
        finish_part(
            *(output + token * num_heads * HEAD_DIM, parts, part_lse, arrivals, sinks),
            *(mean, lse, unit, part_end, begin, share, head_begin, num_units),
            *(row, kv_head, NUM_KV_HEADS, GROUP, HEADS, HEAD_DIM, DIM, PARTS),
        )
        unit = part_end
        if (unit < end) & (unit == (row_begin + num_units) * NUM_KV_HEADS):
            row += 1
            # Rows with several queries have no units.
            while tl.load(unit_starts + row + 1) * NUM_KV_HEADS <= unit:
                row += 1
            row_begin, num_units, seq_len, token, line = _read_row(
                row, unit_starts, seq_lens, query_start, lines
            )


@triton.jit
def _read_row(row, unit_starts, seq_lens, query_start, lines):
    """Return a row's first unit, its number of units, length, token and line of the tables."""
    begin = tl.load(unit_starts + row)
    return (
        begin,
        tl.load(unit_starts + row + 1) - begin,
        tl.load(seq_lens + row),
        tl.load(query_start + row).to(tl.int64),
        tl.load(lines + row).to(tl.int64),
    )


@triton.jit
def _units_before(seq_len, UNIT: tl.constexpr, WINDOW: tl.constexpr):
    """Return the number of whole units that are behind a row's window."""
    before = seq_len * 0
    if WINDOW > 0:
        before = tl.maximum(seq_len - WINDOW, 0) // UNIT
    return before


@triton.jit
def _row_of_unit(unit, unit_starts, num_rows, NUM_KV_HEADS: tl.constexpr):
    """Return the row of a unit, or ``num_rows`` past the last: those before it end before it."""
    row = 0
    for first in range(0, num_rows, _SEARCHED):
        rows = first + tl.arange(0, _SEARCHED)
        ends = tl.load(unit_starts + rows + 1, mask=rows < num_rows, other=2**30 // NUM_KV_HEADS)
        row += tl.sum((ends * NUM_KV_HEADS <= unit).to(tl.int32), axis=0)
    return row


@triton.jit
def _place_of_unit(unit, num_units, seq_len, UNIT: tl.constexpr, WINDOW: tl.constexpr):
    """Return the head and the first slot of a row's unit, counted over all heads."""
    kv_head = unit // num_units
    return kv_head, (_units_before(seq_len, UNIT, WINDOW) + unit - kv_head * num_units) * UNIT


@triton.jit
def _prefetch_tile(
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
def _load_tile(
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
    dims = tl.arange(0, DIM)
    first_row, rows = rows_of_tile(  # pyright: ignore[reportGeneralTypeIssues]
        table, begin, is_read, kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE
    )
    offsets = rows[:, None] * HEAD_DIM + dims[None, :]
    is_number = is_read[:, None] & (dims < HEAD_DIM)[None, :]
    k = load_rows(keys + first_row * HEAD_DIM + offsets, is_number, DTYPE)
    v = load_rows(values + first_row * HEAD_DIM + offsets, is_number, DTYPE)
    if key_scales is None:
        ones = tl.full([TILE], 1.0, tl.float32)
        return k, v, ones, ones
    else:
        key_scale = tl.load(key_scales + first_row + rows, mask=is_read, other=0.0)
        return k, v, key_scale, tl.load(value_scales + first_row + rows, mask=is_read, other=0.0)


@triton.jit
def _attend_unit(
    q,
    k,  # [TILE, DIM], read ahead but for the newest token
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
    HAS_SOFTCAP: tl.constexpr,
):
    """Attend to one tile of slots; return the mean value, and log2 of its weight."""
    slots = begin + tl.arange(0, TILE)
    if begin + TILE >= seq_len:
        is_new = is_seen & (slots == seq_len - 1)
        new_k, new_v, new_key_scale, new_value_scale = _load_tile(  # pyright: ignore[reportGeneralTypeIssues]
            *(keys, values, key_scales, value_scales, table, begin, is_new, kv_head, q.dtype),
            *(NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE),
        )
        k, v = tl.where(is_new[:, None], new_k, k), tl.where(is_new[:, None], new_v, v)
        key_scale = tl.where(is_new, new_key_scale, key_scale)
        value_scale = tl.where(is_new, new_value_scale, value_scale)
    top, total, acc = _nothing_seen(q)  # pyright: ignore[reportGeneralTypeIssues]
    top, total, acc = _attend_tile(
        *(q, k, v, key_scale, value_scale, is_seen, top, total, acc),
        *(scale, softcap, scale_in_cap, key_scales is not None, HAS_SOFTCAP, True),
    )
    return _mean_of_values(top, total, acc)


@triton.jit
def _attend_part(
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
        k, v, key_scale, value_scale = _load_tile(
            *(keys, values, key_scales, value_scales, table, tile, is_seen, kv_head, q.dtype),
            *(NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE),
        )
        top, total, acc = _attend_tile(
            *(q, k, v, key_scale, value_scale, is_seen, top, total, acc),
            *(scale, softcap, scale_in_cap, key_scales is not None, HAS_SOFTCAP, False),
        )
    return _mean_of_values(top, total, acc)


@triton.jit
def _nothing_seen(q):
    """Return the top, total and sums of queries [rows, DIM] that have seen no key."""
    top = tl.full([q.shape[0]], -float("inf"), tl.float32)
    return top, tl.zeros([q.shape[0]], tl.float32), tl.zeros(q.shape, tl.float32)


@triton.jit
def _attend_tile(
    q,
    k,
    v,
    key_scale,
    value_scale,
    is_seen,
    top,
    total,
    acc,
    scale,
    softcap,
    scale_in_cap,
    HAS_SCALES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MAY_SEE_NONE: tl.constexpr,
):
    """Attend to a tile of keys and values; return the new top, total and sums."""
    scores = dot(q, tl.trans(k))
    if HAS_SCALES:
        scores *= key_scale[None, :]
    if HAS_SOFTCAP:
        scores = tanh(scores * scale_in_cap)
    scores = tl.where(is_seen[None, :], scores, -float("inf"))
    weights, shrink, top, total = online_softmax(  # pyright: ignore[reportGeneralTypeIssues]
        scores, softcap if HAS_SOFTCAP else scale, top, total, MAY_SEE_NONE
    )
    if HAS_SCALES:
        weights *= value_scale[None, :]
    return top, total, dot_add(weights.to(v.dtype), v, acc * shrink[:, None])


@triton.jit
def _mean_of_values(top, total, acc):
    """Return the mean values, and log2 of their weights."""
    # A row of length 0 is padding: its mean is 0.
    total = tl.where(total > 0.0, total, 1.0)
    return acc / total[:, None], top + tl.log2(total)

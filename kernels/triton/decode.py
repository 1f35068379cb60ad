"""Paged attention of single queries, with the heads of a group packed together.

Rows and heads follow one another, in units of UNIT slots. If there are enough programs, the units
of each head are cut into parts of nearly the same size, one for a program (``plan.py``):

    | row 0, head 0     | row 0, head 1     | row 1, head 0 | row 1, head 1 |
    | prog. 0 | prog. 1 | prog. 2 | prog. 3 | program 4     | program 5     |

Otherwise all are cut into equal shares, whatever rows these cut: no multiprocessor has more to do
than any other (the idea is Stream-K's, Osama et al. 2023), and within a row nothing interrupts the
reading of keys:

    | row 0, head 0 | row 0, head 1 | row 1, head 0         | row 1, head 1         |
    | program 0 | program 1 | program 2 | program 3 | program 4 | program 5 | prog. 6 |

A row that one program has to itself is finished there. The parts of a row that was cut are merged
by the program that finishes last, which an atomic counter tells.

This is PagedAttention (Kwon et al. 2023) with the merge of Flash-Decoding (Dao et al. 2023) and the
online softmax of FlashAttention-2 (Dao 2023). The heads that share a KV head are the rows of one
matrix product, so keys and values are read once for the group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention import LayerAttention, LayerCache
from kernels.triton.decode_tiles import attend_part, attend_unit, load_tile, prefetch_tile
from kernels.triton.launch import (
    dot_width,
    launch,
    power_of_2,
    shared_memory_bytes,
    wait_for_prior_kernels,
)
from kernels.triton.merge import finish_part, parts_at_once
from kernels.triton.tiles import LOG2_E, readable
from kernels.triton.work import UNIT, AttentionPlan

_TILE = 64
# By a multiprocessor's shared memory, which has to hold two programs. Half of the stages are for
# block numbers.
_STAGES = ((216 << 10, 7), (150 << 10, 5), (0, 3))
_WIDE_STAGES = 4  # for heads over 128
_SEARCHED: tl.constexpr = tl.constexpr(512)  # rows, at once


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
    programs = units.programs
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
        readable(cache.keys),
        readable(cache.values),
        cache.key_scales,
        cache.value_scales,
        query_start,
        seq_lens,
        lines,
        tables,
        units.starts,
        units.parts,
        units.past,
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
        HAS_PARTS=units.may_have_parts,
        # Keys of a source may be stored in this step. Of more heads a program has more units.
        READS_AHEAD=units.may_have_parts and not layer.reads_source,
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
        "part_starts",
        "past_lens",
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
    part_starts,  # the last -1: shares
    past_lens,  # of the rows' sequences, before the step
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
    HAS_PARTS: tl.constexpr,  # or shares; otherwise shares
    READS_AHEAD: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program's part, or its share, part by part; the grid is as large as the machine.

    Until it waits for its turn it reads only the plan, which was complete before the first layer,
    and keys and values of earlier steps, which were complete before the plan.
    """
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    program = tl.program_id(0)
    total = tl.load(unit_starts + num_rows) * NUM_KV_HEADS
    share = tl.cdiv(total, tl.num_programs(0))
    begin = program * share
    all_parts, has_shares, item, starts = 0, program >= 0, begin, unit_starts
    if HAS_PARTS:
        all_parts = tl.load(part_starts + num_rows) * NUM_KV_HEADS
        # A captured grid may be smaller than what there are parts for.
        has_shares = (all_parts < 0) | (all_parts > tl.num_programs(0))
        item = tl.where(has_shares, begin, program)
        starts = tl.where(has_shares, unit_starts, part_starts)
    row = _row_of_item(item, starts, num_rows, NUM_KV_HEADS)
    row = tl.minimum(row, num_rows - 1)  # an idle program's is past the end
    row_begin, num_units, seq_len, token, line = _read_row(
        row, unit_starts, seq_lens, query_start, lines
    )
    kv_head = (begin - row_begin * NUM_KV_HEADS) // tl.maximum(num_units, 1)
    end = begin + share
    first_part, row_parts = row * 0, row * 0 + 1
    if HAS_PARTS:
        first_part = tl.load(part_starts + row)
        row_parts = tl.maximum(tl.load(part_starts + row + 1) - first_part, 1)
        item = program - first_part * NUM_KV_HEADS  # of the row's, over all heads
        kv_head = tl.where(has_shares, kv_head, item // row_parts)
        cut = item - kv_head * row_parts
        head_begin = row_begin * NUM_KV_HEADS + kv_head * num_units
        begin = tl.where(has_shares, begin, head_begin + cut * num_units // row_parts)
        part_end = head_begin + (cut + 1) * num_units // row_parts
        end = tl.where(has_shares, end, tl.where(program < all_parts, part_end, begin))
    head_begin = row_begin * NUM_KV_HEADS + kv_head * num_units
    end = tl.minimum(end, total)
    group = tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, DIM)
    in_group = group < GROUP
    in_tile = in_group[:, None] & (dims < HEAD_DIM)[None, :]
    table = tables + line * table_stride
    # One unit is too short for a loop, which would prepare several tiles before the first is used.
    # It is read ahead, but for the step's tokens.
    READS_UNIT: tl.constexpr = READS_AHEAD and UNIT == TILE
    is_unit = READS_UNIT & (end - begin == 1)
    past = seq_len
    # An idle program's would be past the table.
    before = tl.where(begin < end, begin - head_begin, 0)
    first = (_units_before(seq_len, UNIT, WINDOW) + before) * UNIT
    slots = first + tl.arange(0, TILE)
    if READS_UNIT:
        past = tl.load(past_lens + row)
        is_seen = (slots < seq_len) & is_unit
        if WINDOW > 0:
            is_seen = is_seen & (slots >= seq_len - WINDOW)
        k, v, key_scale, value_scale = load_tile(
            *(keys, values, key_scales, value_scales, table, first),
            *(is_seen & (slots < past), kv_head, query.dtype.element_ty),
            *(NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE),
        )
    if (begin < end) & (not is_unit):
        prefetch_tile(
            *(keys, values, table, first, slots < seq_len, kv_head),
            *(NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE),
        )
    wait_for_prior_kernels()
    unit = begin
    if READS_UNIT:  # noqa: SIM102 - compiled only if so
        if is_unit:
            heads = kv_head * GROUP + group
            place = query + token * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
            # Padding, which has no keys, may be no number.
            q = tl.load(place, mask=in_tile & (seq_len > 0), other=0.0)
            mean, lse = attend_unit(
                *(q, k, v, key_scale, value_scale, keys, values, key_scales, value_scales),
                *(table, first, is_seen, past, kv_head, scale, softcap, scale_in_cap),
                *(NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE, HAS_SOFTCAP),
            )
            first_program, num_parts, starts_inside = _parts_of_head(
                *(has_shares, share, head_begin, num_units, first_part, row_parts, kv_head),
                NUM_KV_HEADS,
            )
            finish_part(
                *(output + token * num_heads * HEAD_DIM, parts, part_lse, arrivals, sinks),
                *(mean, lse, 2 * program, 2 * first_program, num_parts, starts_inside),
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
        mean, lse = attend_part(
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
        first_program, num_parts, starts_inside = _parts_of_head(
            *(has_shares, share, head_begin, num_units, first_part, row_parts, kv_head),
            NUM_KV_HEADS,
        )
        part = 2 * program + (unit > begin).to(tl.int32)
        finish_part(
            *(output + token * num_heads * HEAD_DIM, parts, part_lse, arrivals, sinks),
            *(mean, lse, part, 2 * first_program, num_parts, starts_inside),
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
def _row_of_item(item, starts, num_rows, NUM_KV_HEADS: tl.constexpr):
    """Return the row of a unit or part, or ``num_rows`` past the last: those before it end before
    it."""
    row = 0
    for first in range(0, num_rows, _SEARCHED):
        rows = first + tl.arange(0, _SEARCHED)
        ends = tl.load(starts + rows + 1, mask=rows < num_rows, other=2**30 // NUM_KV_HEADS)
        row += tl.sum((ends * NUM_KV_HEADS <= item).to(tl.int32), axis=0)
    return row


@triton.jit
def _parts_of_head(
    has_shares,
    share,
    head_begin,
    num_units,
    first_part,  # of the row's heads, if there are parts
    row_parts,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
):
    """Return the program of a head's first part, the number of parts, and 1 if the first one is not
    at the beginning of its program's share."""
    first = head_begin // share
    num_parts = (head_begin + num_units - 1) // share - first + 1
    starts_inside = (head_begin > first * share).to(tl.int32)
    first = tl.where(has_shares, first, first_part * NUM_KV_HEADS + kv_head * row_parts)
    num_parts = tl.where(has_shares, num_parts, row_parts)
    return first, num_parts, tl.where(has_shares, starts_inside, 0)

"""Paged attention of prompt chunks: many queries per row, ragged, with padding only at tile ends.

This is FlashAttention-2 (Dao 2023) over the blocks of PagedAttention (Kwon et al. 2023). A tile has
adjacent queries of one row with all the heads that share a KV head; its rows are ``query * group +
head``, so a short chunk of a model with large groups still fills the matrix units.

    keys:   | outside the window | window's edge |   seen by all   | diagonal | future |
            |      skipped       |    masked     | no mask at all  |  masked  | skipped|

A tile's scores, weights and sums follow one another. What keeps the matrix units busy meanwhile is
a second program on the same multiprocessor, wherever registers and shared memory hold two: with
heads of up to 128, at 128 registers a thread. It also works while the other begins or ends, which
takes as long as several tiles of keys. (Products in flight beside their neighbours' weights, as in
FlashAttention-3, Shah et al. 2024, within one program of 251 registers, took 8 to 30 % longer on an
H200; tiles of 64 rows fetch keys and values twice as often, and took as long.) With addresses in so
few registers the assembler makes each product wait for the one before. Where Hopper's TMA can copy
tiles, ``prefill_tiles.py`` does without addresses: 6 to 15 % less time.

Sums of 128 rows of 256 numbers are all that fits in registers. A tile of wider heads, up to 512
(those of Gemma 4's full attention), is processed by two programs, each of which computes all scores
and sums half of each value: keys are read and multiplied twice. If each had half of the rows
instead, the same would apply to values too, and a tile's products would be too few to hide its
loading time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention import LayerAttention, LayerCache
from kernels.triton.launch import (
    dot_width,
    fits,
    launch,
    shared_memory_bytes,
    wait_for_prior_kernels,
)
from kernels.triton.plan import describe_tile
from kernels.triton.prefill_tiles import (
    are_copied_whole,
    attend_to_tiles,
    only_seen,
    row_of_slot,
    tiles_of,
)
from kernels.triton.tiles import (
    LOG2_E,
    dot,
    dot_add,
    load_rows,
    online_softmax,
    part_of_keys,
    readable,
    rows_of_tile,
    tanh,
)
from kernels.triton.work import TILE_ROWS, AttentionPlan

COPIES_TILES = True  # where it can; without is a variant of ``kernels.bench.variants``
_TILE = 64
_LEAST_TILE = 16  # of slots, one side of a product
_MAX_SUMS = 256  # of a value's numbers per program
_WARPS = TILE_ROWS // 16
# Two programs of 96 KB: queries, and two tiles of keys and values.
_SHARED_BYTES_OF_TWO = 200 << 10
_REGISTERS_OF_TWO = 65536 // (2 * _WARPS * 32)  # of a thread


def prefill_attention(
    plan: AttentionPlan,
    layer: LayerAttention,
    query: torch.Tensor,
    cache: LayerCache,
    output: torch.Tensor,
) -> None:
    """Attend for the rows that the plan has cut into tiles, and write their results to ``output``.

    The arguments are those of ``decode_attention``; a plan serves any window.
    """
    assert plan.tiles is not None
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = cache.keys.shape[1:3]
    tiles, tables, ends = plan.tiles, plan.geometry.tables, plan.geometry.query_ends
    dim, is_coded = dot_width(head_dim), cache.key_scales is not None
    # float32 takes twice the bytes; it need not be fast, but it has to fit.
    is_wide = query.dtype.itemsize > 2
    sums = min(dim, _MAX_SUMS)
    # Widened tiles of wide heads would not fit in registers, the widest not in shared memory.
    is_half = is_wide or dim > sums or (dim > 128 and is_coded)
    rows, tile = TILE_ROWS, _TILE // 2 if is_half else _TILE
    if is_wide or dim > 128:
        rows, tile = _wide_tile(query, dim, sums, tile)
    is_small = dim <= 128 and not is_wide
    has_two = is_small and not is_coded
    has_two = has_two and shared_memory_bytes(query.device) >= _SHARED_BYTES_OF_TWO
    key_tiles = value_tiles = None
    if COPIES_TILES and has_two and are_copied_whole(query, cache, _TILE):
        key_tiles, value_tiles = (tiles_of(part, _TILE) for part in (cache.keys, cache.values))
    launch(
        _prefill_kernel,
        (tiles.capacity * num_kv_heads, dim // sums, TILE_ROWS // rows),
        output,
        query,
        readable(cache.keys),
        readable(cache.values),
        key_tiles,
        value_tiles,
        cache.key_scales,
        cache.value_scales,
        tiles.count,
        tiles.records,
        tables,
        ends if layer.is_bidirectional else None,
        layer.sinks,
        query.stride(0),
        tables.stride(0),
        layer.scale * LOG2_E.value,
        (layer.softcap or 0.0) * LOG2_E.value,
        layer.scale / (layer.softcap or 1.0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        DIM=dim,
        SUMS=sums,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        PLANNED_ROWS=TILE_ROWS,
        TILE=tile,
        WINDOW=layer.window or 0,
        HAS_SOFTCAP=layer.softcap is not None,
        num_warps=_WARPS,
        num_stages=3 if has_two or (dim > sums and not is_coded) else 5 if is_small else 2,
        maxnreg=_REGISTERS_OF_TWO if has_two else None,
    )


def _wide_tile(query: torch.Tensor, dim: int, sums: int, tile: int) -> tuple[int, int]:
    """Return the rows of queries and the slots of a program: fewer if they do not fit in shared
    memory, as on most GPUs (one program of an A100 has 163 KB, of consumers' GPUs 99 KB).

    Queries, weights, keys and values lie there, the latter two as they are copied while others are
    multiplied.
    """
    rows = TILE_ROWS

    def is_too_large() -> bool:
        numbers = rows * (dim + tile) + tile * (dim + sums)
        return not fits(query.device, numbers * query.dtype.itemsize)

    if is_too_large():
        rows //= 2
    while is_too_large() and tile > _LEAST_TILE:
        tile //= 2
    return rows, tile


# Arguments that change from step to step are not specialised on: see plan.py.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["num_tiles", "tables", "ends"],
)
def _prefill_kernel(
    output,
    query,
    keys,
    values,
    key_tiles,  # descriptors of the same, or None
    value_tiles,
    key_scales,  # None unless the cache is quantised
    value_scales,
    num_tiles,
    tiles,
    tables,
    ends,  # None: queries attend up to themselves
    sinks,
    query_stride,
    table_stride,
    scale,  # times log2 e
    softcap,  # times log2 e
    scale_in_cap,  # scale / softcap
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PLANNED_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One query tile of one KV head, or a part of its rows, and ``SUMS`` elements of each value."""
    wait_for_prior_kernels()
    tile, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    first_query, num_queries, begin, seq_len, line = describe_tile(tile, tiles)
    # The grid has an upper bound of the tiles.
    if tile >= tl.load(num_tiles):
        return
    QUERIES: tl.constexpr = PLANNED_ROWS // GROUP
    past = seq_len - num_queries
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP

    place = tl.arange(0, ROWS)
    if ROWS < PLANNED_ROWS:
        place += tl.program_id(2) * ROWS
        if first_query + tl.program_id(2) * ROWS // GROUP >= num_queries:
            return
    dims = tl.arange(0, DIM)
    local = first_query + place // GROUP
    heads = kv_head * GROUP + place % GROUP
    is_query = (place < QUERIES * GROUP) & (local < num_queries)
    in_tile = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (begin + local).to(tl.int64)
    # Rows without a query use the last one's position, which keeps their softmax finite.
    last_query = tl.minimum(first_query + QUERIES, num_queries) - 1
    positions = past + tl.minimum(local, last_query)

    last_seen = positions
    behind = past + last_query + 1
    end = behind
    if ends is not None:
        last_seen = tl.load(ends + begin + tl.minimum(local, last_query)) - 1
        end = tl.max(last_seen) + 1
    first_position = past + first_query
    seen_by_all = (first_position + 1) // TILE * TILE  # where the diagonal begins
    lowest = 0
    unmasked = 0
    if WINDOW > 0:
        lowest = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
        unmasked = tl.cdiv(tl.maximum(behind - WINDOW, 0), TILE) * TILE
        unmasked = tl.maximum(tl.minimum(unmasked, end), 0)  # padding ends before position 0
    seen_by_all = tl.maximum(seen_by_all, unmasked)
    first_seen = first_position - WINDOW + 1
    table = tables + line.to(tl.int64) * table_stride
    first_row = 0
    if key_tiles is not None:
        # Ahead of the queries, whose arrival the compiler awaits where they are loaded.
        first_row = row_of_slot(table, lowest, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
    q = tl.load(
        query + (tokens * query_stride + heads * HEAD_DIM)[:, None] + dims[None, :],
        mask=in_tile,
        other=0.0,
    )
    value_dims = dims
    if SUMS < DIM:
        value_dims = tl.program_id(1) * SUMS + tl.arange(0, SUMS)
    if key_tiles is not None:
        acc, top, total = attend_to_tiles(
            *(q, key_tiles, value_tiles, table, kv_head, first_row, seq_len),
            *(lowest, unmasked, seen_by_all, end, positions, last_seen),
            *(scale, softcap, scale_in_cap),
            *(NUM_KV_HEADS, BLOCK_SIZE, TILE, WINDOW, HAS_SOFTCAP),
        )
    else:
        acc, top, total = _attend(
            *(q, keys, values, key_scales, value_scales, table, kv_head, seq_len),
            *(lowest, unmasked, seen_by_all, end, first_seen, positions, last_seen),
            *(scale, softcap, scale_in_cap),
            *(NUM_KV_HEADS, HEAD_DIM, SUMS, BLOCK_SIZE, TILE, WINDOW, HAS_SOFTCAP),
        )
    if sinks is not None:
        sink = tl.load(sinks + heads) * LOG2_E
        total += tl.exp2(sink - top)
    # A row of length 0 is padding: its output is 0.
    acc *= (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    target = output + (tokens * num_heads + heads)[:, None] * HEAD_DIM + value_dims[None, :]
    is_made = is_query[:, None] & (value_dims < HEAD_DIM)[None, :]
    tl.store(target, acc.to(output.dtype.element_ty), mask=is_made)


@triton.jit
def _attend(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    kv_head,
    seq_len,
    lowest,
    unmasked,
    seen_by_all,
    end,
    first_seen,
    positions,
    last_seen,
    scale,
    softcap,
    scale_in_cap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Attend with a tile's queries, for ``SUMS`` elements of each value: the program's part.

    Returns:
        Sums of weighted values [rows, SUMS], tops and totals [rows], float32.
    """
    ROWS: tl.constexpr = q.shape[0]
    DIM: tl.constexpr = q.shape[1]
    HAS_OTHERS: tl.constexpr = WINDOW > 0 and BLOCK_SIZE % TILE != 0
    dims = tl.arange(0, DIM)
    value_dims = dims
    if SUMS < DIM:
        value_dims = tl.program_id(1) * SUMS + tl.arange(0, SUMS)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, SUMS], tl.float32)
    # With several loops the products of the widest heads would be serialised (ptxas).
    FIRST_PART: tl.constexpr = 2 if SUMS < DIM else 0 if WINDOW > 0 else 1
    for part in tl.static_range(FIRST_PART, 3):
        part_begin, part_end = part_of_keys(lowest, unmasked, seen_by_all, end, part, SUMS < DIM)
        for begin in range(part_begin, part_end, TILE):
            slots = begin + tl.arange(0, TILE)
            is_used = slots < seq_len
            if HAS_OTHERS:
                is_used = is_used & (slots >= first_seen)
            first_row, rows = rows_of_tile(
                table, begin, is_used, kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE
            )
            is_key = (dims < HEAD_DIM)[None, :]
            if part != 1:
                is_key = is_key & is_used[:, None]
            places = rows[:, None] * HEAD_DIM + dims[None, :]
            k = load_rows(keys + first_row * HEAD_DIM + places, is_key, q.dtype)
            scores = dot(q, tl.trans(k))
            if key_scales is not None:
                scores *= tl.load(key_scales + first_row + rows, mask=is_used, other=0.0)[None, :]
            if HAS_SOFTCAP:
                scores = tanh(scores * scale_in_cap)
            if part != 1:
                scores = only_seen(scores, slots, positions, last_seen, WINDOW)
            weights, shrink, top, total = online_softmax(
                scores, softcap if HAS_SOFTCAP else scale, top, total, WINDOW > 0
            )
            if value_scales is not None:
                value_scale = tl.load(value_scales + first_row + rows, mask=is_used, other=0.0)
                weights *= value_scale[None, :]
            v = _values_of_tile(
                *(values, table, begin, first_seen, seq_len, kv_head, value_dims),
                *(part != 1, HAS_OTHERS, q.dtype),
                *(NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE),
            )
            acc = dot_add(weights.to(v.dtype), v, acc * shrink[:, None])
    return acc, top, total


@triton.jit
def _values_of_tile(
    values,
    table,
    begin,
    first_seen,
    seq_len,
    kv_head,
    value_dims,
    IS_MASKED: tl.constexpr,  # or all of the tile is the sequence's
    HAS_OTHERS: tl.constexpr,  # before ``first_seen``
    DTYPE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """[TILE, value_dims]; what lies past a sequence's end belongs to nobody and is not read.

    Blocks wholly behind the window are somebody else's, who may have left there what is no number:
    where a tile begins with some (``HAS_OTHERS``), they are not read either.
    """
    slots = begin + tl.arange(0, TILE)
    is_used = slots < seq_len
    if HAS_OTHERS:
        is_used = is_used & (slots >= first_seen)
    first_row, rows = rows_of_tile(  # pyright: ignore[reportGeneralTypeIssues]
        table, begin, is_used, kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE
    )
    is_value = (value_dims < HEAD_DIM)[None, :]
    if IS_MASKED or HAS_OTHERS:
        is_value = is_value & is_used[:, None]
    places = rows[:, None] * HEAD_DIM + value_dims[None, :]
    return load_rows(values + first_row * HEAD_DIM + places, is_value, DTYPE)

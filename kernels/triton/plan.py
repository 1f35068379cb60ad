"""Divide a step's attention into work items, on the device, from the lengths there.

    a row with one query     ─► units of UNIT slots, in parts         ─► decode.py
                             ─► or splits: runs of SPLIT_SIZE slots   ─► latent.py, invariant_decode
    a row with several       ─► tiles: runs of adjacent queries       ─► prefill.py

Parts keep all multiprocessors busy to the end, but where they cut a row depends on the batch.
Splits have a fixed size: which keys are summed together depends only on a row's own length, so its
result has the same bits in any batch. The host knows only bounds, which determine grids and
buffers: one captured CUDA graph serves all batches within them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention import DeviceGeometry
from kernels.triton.launch import (
    launch,
    persistent_programs,
    power_of_2,
    wait_for_prior_kernels,
)
from kernels.triton.work import (
    AttentionPlan,
    TileList,
    WorkBounds,
    WorkList,
    WorkUnits,
    queries_per_tile,
)

PROGRAMS_PER_SM = 2  # that attend to parts
_PLAN_ROWS = 512
_FILL = 128
_TILE_FIELDS: tl.constexpr = tl.constexpr(8)  # 32 bytes, five of the eight used
_TILES = -1  # stands for tiles where a window stands for splits
_SIZES: tl.constexpr = tl.constexpr(4)  # of parts, that are tried
_FEW_UNITS: tl.constexpr = tl.constexpr(8)  # in a part that may be one larger than a share


def plan_attention(
    bounds: WorkBounds,
    geometry: DeviceGeometry,
    windows: tuple[int | None, ...],
    group: int,
    num_kv_heads: int,
) -> AttentionPlan:
    """Number the work items of a step, in one launch and without waiting for the device.

    Args:
        bounds: of the batch.
        geometry: the batch on the device.
        windows: the distinct windows of the layers.
        group: as for ``WorkBounds.of``.
        num_kv_heads: of the layers.
    """
    num_rows, device = bounds.num_rows, geometry.seq_lens.device
    # All kinds, even those without items in this batch: the kernel is compiled once.
    kinds = (_TILES, *(window or 0 for window in windows))
    # The lists of splits are concatenated, each with room for the longest. Units are not listed.
    capacity = 0 if bounds.has_units else bounds.num_splits
    tiles = torch.empty((bounds.num_tiles, _TILE_FIELDS.value), dtype=torch.int32, device=device)
    starts = torch.empty((2, len(kinds), num_rows + 1), dtype=torch.int32, device=device)
    programs = persistent_programs(device, PROGRAMS_PER_SM)
    rows = torch.empty((len(windows), capacity), dtype=torch.int32, device=device)
    launch(
        _plan_kernel,
        (num_rows, len(kinds)),
        starts,
        tiles,
        rows,
        geometry.query_start,
        geometry.seq_lens,
        geometry.slots,
        num_rows,
        capacity,
        KINDS=kinds,
        NUM_KINDS=len(kinds),
        TILES_ONLY=bounds.tiles_only,
        QUERIES=queries_per_tile(group),
        SPLIT_SIZE=bounds.split_size,
        ROWS=_PLAN_ROWS,
        FILL=_FILL,
        LISTS_SPLITS=not bounds.has_units,
        PROGRAMS=programs,
        HEADS=num_kv_heads,
        PART_ROWS=power_of_2(max(programs // num_kv_heads, 1)),
    )
    arrivals = None
    if bounds.has_units and bounds.num_splits:
        # A library's operation, which waits for the whole plan: later kernels may read the plan
        # before they wait for their turns.
        arrivals = torch.zeros((num_rows, num_kv_heads), dtype=torch.int32, device=device)
    begins, parts = starts.unbind()
    tile_list = TileList(begins[0, num_rows:], tiles) if bounds.num_tiles else None
    splits, units = {}, {}
    for kind, window in enumerate(windows, start=1):
        most = bounds.splits_within(window)
        if bounds.num_splits and arrivals is not None:
            # Tiles have no parts: ``past`` is in their place.
            units[window] = WorkUnits(
                *(begins[kind], parts[kind], parts[0], min(most * num_kv_heads, programs)),
                *(num_rows * num_kv_heads <= programs, arrivals),
            )
        elif bounds.num_splits:
            splits[window] = WorkList(begins[kind], rows[kind - 1, :most])
    return AttentionPlan(geometry, splits, units, tile_list, bounds.merges)


@triton.jit
def first_split_of(seq_len, window, SPLIT_SIZE: tl.constexpr):
    """Return the number of the first split that a single query attends to."""
    return tl.where(window > 0, tl.maximum(seq_len - window, 0) // SPLIT_SIZE, 0)


@triton.jit
def describe_tile(tile, tiles):
    """Return a tile's first query in its row, the row's number of queries, the first one's number
    in the batch, the row's length, and its line of the block tables.

    They may be read before it is known whether there is such a tile.
    """
    record = tiles + tile * _TILE_FIELDS
    return (
        tl.load(record),
        tl.load(record + 1),
        tl.load(record + 2),
        tl.load(record + 3),
        tl.load(record + 4),
    )


@triton.jit
def locate_split(item, starts, rows):
    """Return a split's row, its number in the row, and the row's number of splits."""
    row = tl.load(rows + item)
    first = tl.load(starts + row)
    return row, item - first, tl.load(starts + row + 1) - first


@triton.jit
def _num_items(
    query_start,
    seq_lens,
    rows,
    is_row,
    window,
    TILES_ONLY: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
):
    """Return the number of tiles of some rows, if the window is ``_TILES``; else of splits."""
    begin = tl.load(query_start + rows, mask=is_row, other=0)
    num_queries = tl.load(query_start + rows + 1, mask=is_row, other=0) - begin
    seq_len = tl.load(seq_lens + rows, mask=is_row, other=0)
    splits = tl.cdiv(seq_len, SPLIT_SIZE) - first_split_of(seq_len, window, SPLIT_SIZE)
    tiles = tl.cdiv(num_queries, QUERIES)
    is_split = num_queries == (-1 if TILES_ONLY else 1)
    return tl.where(
        window < 0,
        tl.where(is_split, 0, tiles),
        tl.where(is_split, tl.maximum(splits, 1), 0),
    )


# Arguments that change from step to step are not specialised on: a new combination would compile
# while requests wait.
@triton.jit(
    do_not_specialize=["num_rows", "capacity"],
    do_not_specialize_on_alignment=["starts", "split_rows", "query_start", "seq_lens", "lines"],
)
def _plan_kernel(
    starts,  # [2, kinds, num_rows + 1] out; the second half, with units: see ``WorkUnits``
    tiles,  # [capacity of tiles, _TILE_FIELDS] out
    split_rows,  # [kinds - 1, capacity] out
    query_start,
    seq_lens,
    lines,
    num_rows,
    capacity,
    KINDS: tl.constexpr,  # _TILES, or a window for splits, 0 for none
    NUM_KINDS: tl.constexpr,
    TILES_ONLY: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    FILL: tl.constexpr,
    LISTS_SPLITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HEADS: tl.constexpr,
    PART_ROWS: tl.constexpr,
):
    """One program per row and kind; each counts the items before its row itself, so none waits."""
    wait_for_prior_kernels()
    row, kind = tl.program_id(0), tl.program_id(1)
    window = kind * 0
    for i in tl.static_range(NUM_KINDS):  # pyright: ignore[reportGeneralTypeIssues]
        window = tl.where(kind == i, KINDS[i], window)
    before = tl.zeros([ROWS], tl.int32)
    for begin in range(0, row, ROWS):
        rows = begin + tl.arange(0, ROWS)
        before += _num_items(
            query_start, seq_lens, rows, rows < row, window, TILES_ONLY, QUERIES, SPLIT_SIZE
        )
    start = tl.sum(before, axis=0)
    count = _num_items(
        query_start, seq_lens, row, row >= 0, window, TILES_ONLY, QUERIES, SPLIT_SIZE
    )
    starts += kind * (num_rows + 1)
    tl.store(starts + row, start)
    if row == num_rows - 1:
        tl.store(starts + num_rows, start + count)
    if not LISTS_SPLITS:
        of_units = starts + NUM_KINDS * (num_rows + 1)
        if kind > 0:
            _cut_units(
                *(of_units, query_start, seq_lens, row, num_rows, window),
                *(TILES_ONLY, QUERIES, SPLIT_SIZE, PROGRAMS, HEADS, PART_ROWS),
            )
            return
        _store_past(of_units + row, query_start, seq_lens, row, ROWS)
    if kind == 0:
        _describe_tiles(tiles, query_start, seq_lens, lines, row, start, count, QUERIES, FILL)
        return
    place = split_rows + (kind - 1).to(tl.int64) * capacity + start
    for first in range(0, count, FILL):
        at = first + tl.arange(0, FILL)
        tl.store(place + at, row + at * 0, mask=at < count)


@triton.jit
def _describe_tiles(
    tiles,
    query_start,
    seq_lens,
    lines,
    row,
    start,
    count,
    QUERIES: tl.constexpr,
    FILL: tl.constexpr,
):
    """Store a row's tiles from ``start`` on, for ``describe_tile``."""
    begin = tl.load(query_start + row)
    num_queries = tl.load(query_start + row + 1) - begin
    seq_len, line = tl.load(seq_lens + row), tl.load(lines + row)
    for first in range(0, count, FILL):
        at = first + tl.arange(0, FILL)
        place, is_tile = tiles + (start + at) * _TILE_FIELDS, at < count
        # The last tile has the most keys: it starts first, so that it does not finish alone.
        tl.store(place, (count - 1 - at) * QUERIES, mask=is_tile)
        same = at * 0
        tl.store(place + 1, num_queries + same, mask=is_tile)
        tl.store(place + 2, begin + same, mask=is_tile)
        tl.store(place + 3, seq_len + same, mask=is_tile)
        tl.store(place + 4, line + same, mask=is_tile)


@triton.jit
def _cut_units(
    part_starts,  # [num_rows + 1] out
    query_start,
    seq_lens,
    row,
    num_rows,
    window,
    TILES_ONLY: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HEADS: tl.constexpr,
    PART_ROWS: tl.constexpr,
):
    """Number a row's parts: of the smallest of some sizes for which the programs suffice.

    There are none if parts would be larger than shares by more than a share's cuts cost: at each,
    a program begins anew.
    """
    start, end = row * 0, row * 0 - 1
    if num_rows <= PART_ROWS:
        rows = tl.arange(0, PART_ROWS)
        units = _num_items(
            *(query_start, seq_lens, rows, rows < num_rows, window),
            *(TILES_ONLY, QUERIES, SPLIT_SIZE),
        )
        least = tl.maximum(tl.cdiv(tl.sum(units, axis=0) * HEADS, PROGRAMS), 1)
        more = tl.where(least < _FEW_UNITS, 1, least // 32)
        sizes = least + tl.minimum(tl.arange(0, _SIZES), more)
        needed = tl.sum(tl.cdiv(units[:, None], sizes[None, :]), axis=0) * HEADS
        size = tl.min(tl.where(needed <= PROGRAMS, sizes, 2**30), axis=0)
        parts = tl.cdiv(units, size)
        start = tl.sum(tl.where(rows < row, parts, 0), axis=0)
        end = tl.where(size < 2**30, start + tl.sum(tl.where(rows == row, parts, 0), axis=0), -1)
    tl.store(part_starts + row, start)
    if row == num_rows - 1:
        tl.store(part_starts + num_rows, end)


@triton.jit
def _store_past(place, query_start, seq_lens, row, ROWS: tl.constexpr):
    """Store how many of a row's tokens earlier steps have stored.

    Drafts that are verified may be rows of one sequence, each beginning where the one before ends.
    Their lines need not tell: chunks of a context have lines of their own (``kernels.chunked``), as
    have all rows on other ranks. A row that begins there by chance reads less ahead, and no more.
    """
    first = tl.zeros([ROWS], tl.int32)  # row of the sequence
    for begin in range(0, row + 1, ROWS):
        rows = begin + tl.arange(0, ROWS)
        is_behind = (rows > 0) & (rows <= row)
        before = _tokens_before(query_start, seq_lens, rows, rows <= row)
        ended = tl.load(seq_lens + rows - 1, mask=is_behind, other=0)
        first = tl.maximum(first, tl.where(is_behind & (before != ended), rows, 0))
    first_row = tl.max(first, axis=0)
    tl.store(place, _tokens_before(query_start, seq_lens, first_row, first_row >= 0))


@triton.jit
def _tokens_before(query_start, seq_lens, rows, is_row):
    """Return how many tokens rows have before this step's."""
    start = tl.load(query_start + rows, mask=is_row, other=0)
    count = tl.load(query_start + rows + 1, mask=is_row, other=0) - start
    return tl.load(seq_lens + rows, mask=is_row, other=0) - count

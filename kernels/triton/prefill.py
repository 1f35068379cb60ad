"""Paged attention of prompt chunks: many queries a row, ragged, nothing padded but tile ends.

FlashAttention-2 (Dao 2023) over the blocks of PagedAttention (Kwon et al. 2023). A tile is a run
of neighbouring queries of one row with all the heads that share a KV head, ``query * group +
head`` its rows, so a short chunk of a model with large groups still fills the matrix units.

    keys:   | outside the window | window's edge |   seen by all   | diagonal | future |
            |      skipped       |    masked     | no mask at all  |  masked  | skipped|
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.attention import LayerAttention, LayerCache
from kernels.triton.launch import launch, power_of_2
from kernels.triton.tiles import LOG2_E, dot, dot_add, row_offsets, tanh

_ROWS = 128  # of a query tile: two warp groups' products
_TILE = 64


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The query tiles of a step, those with most keys first. Lives on the device."""

    tile_rows: torch.Tensor  # [tiles] int32, which of the rows below
    tile_starts: torch.Tensor  # [tiles] int32, the tile's first query, counted within its row
    query_begins: torch.Tensor  # [rows] int32, where a row's queries begin in the batch
    query_lens: torch.Tensor  # [rows] int32
    seq_lens: torch.Tensor  # [rows] int32, the queries included: they are the last ones
    block_tables: torch.Tensor  # [rows, width] int32


def plan_prefill(
    lengths: np.ndarray,
    seq_lengths: np.ndarray,
    group: int,
    query_begins: torch.Tensor,
    query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
) -> PrefillPlan:
    """Cut the queries of some rows into tiles.

    Args:
        lengths, seq_lengths: [rows] what ``query_lens`` and ``seq_lens`` hold, on the host.
        group: query heads to a KV head, at most 128.
        query_begins, query_lens, seq_lens: [rows] int32, on the device.
        block_tables: [rows, width] int32, on the device.
    """
    num_queries = queries_a_tile(group)
    counts = -(-lengths // num_queries)
    tile_rows = np.repeat(np.arange(lengths.size), counts)
    first = np.cumsum(counts) - counts
    starts = (np.arange(tile_rows.size) - np.repeat(first, counts)) * num_queries
    # Those with most keys first, so that no long tile is left for the end.
    last_query = np.minimum(starts + num_queries, lengths[tile_rows])
    order = np.argsort(lengths[tile_rows] - seq_lengths[tile_rows] - last_query, kind="stable")
    tiles = np.stack((tile_rows[order], starts[order])).astype(np.int32)
    rows, starts = torch.from_numpy(tiles).to(seq_lens.device)
    return PrefillPlan(rows, starts, query_begins, query_lens, seq_lens, block_tables)


def queries_a_tile(group: int) -> int:
    """Neighbouring queries in one tile; with a group of 7, say, 18 of 126 rows."""
    return _ROWS // group


def prefill_attention(
    plan: PrefillPlan,
    layer: LayerAttention,
    query: torch.Tensor,
    cache: LayerCache,
    output: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend, and write the plan's rows into ``output``; the arguments are ``decode_attention``'s.

    Any window goes with any plan.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = cache.keys.shape[1:3]
    dim = power_of_2(head_dim)
    launch(
        _prefill_kernel,
        (plan.tile_rows.shape[0] * num_kv_heads,),
        output,
        query,
        cache.keys,
        cache.values,
        plan.tile_rows,
        plan.tile_starts,
        plan.query_begins,
        plan.query_lens,
        plan.seq_lens,
        plan.block_tables,
        sinks,
        query.stride(0),
        plan.block_tables.stride(0),
        layer.scale * LOG2_E.value,
        (layer.softcap or 0.0) * LOG2_E.value,
        layer.scale / (layer.softcap or 1.0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        DIM=dim,
        BLOCK_SIZE=block_size,
        ROWS=_ROWS,
        TILE=_TILE,
        WINDOW=layer.window or 0,
        HAS_SOFTCAP=layer.softcap is not None,
        num_warps=8,
        num_stages=5 if dim <= 128 else 2,
    )


# What changes from step to step is not specialised on: see decode.py.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=[
        "tile_rows",
        "tile_starts",
        "query_begins",
        "query_lens",
        "seq_lens",
        "block_tables",
    ],
)
def _prefill_kernel(
    output,
    query,
    keys,
    values,
    tile_rows,
    tile_starts,
    query_begins,
    query_lens,
    seq_lens,
    block_tables,
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
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One query tile of one KV head."""
    tile, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    row, first_query = tl.load(tile_rows + tile), tl.load(tile_starts + tile)
    begin, num_queries = tl.load(query_begins + row), tl.load(query_lens + row)
    seq_len = tl.load(seq_lens + row)
    past = seq_len - num_queries
    QUERIES: tl.constexpr = ROWS // GROUP
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP

    place = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    local = first_query + place // GROUP
    heads = kv_head * GROUP + place % GROUP
    is_query = (place < QUERIES * GROUP) & (local < num_queries)
    in_tile = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (begin + local).to(tl.int64)
    q = tl.load(
        query + (tokens * query_stride + heads * HEAD_DIM)[:, None] + dims[None, :],
        mask=in_tile,
        other=0.0,
    )
    # Rows that are no query look where the last one does: their softmax stays finite.
    last_query = tl.minimum(first_query + QUERIES, num_queries) - 1
    positions = past + tl.minimum(local, last_query)

    end = past + last_query + 1
    first_position = past + first_query
    seen_by_all = (first_position + 1) // TILE * TILE  # where the diagonal begins
    lowest = 0
    unmasked = 0
    if WINDOW > 0:
        lowest = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
        unmasked = tl.cdiv(tl.maximum(end - WINDOW, 0), TILE) * TILE
        unmasked = tl.minimum(unmasked, end)
    seen_by_all = tl.maximum(seen_by_all, unmasked)

    table = block_tables + row.to(tl.int64) * table_stride
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
        if part == 0:
            part_begin, part_end = lowest, unmasked
        elif part == 1:
            part_begin, part_end = unmasked, seen_by_all
        else:
            part_begin, part_end = seen_by_all, end
        for begin_slot in range(part_begin, part_end, TILE):
            slots = begin_slot + tl.arange(0, TILE)
            is_used = slots < seq_len
            rows = row_offsets(table, slots, is_used, kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE)
            offsets = rows[:, None] * HEAD_DIM + dims[None, :]
            is_read = (dims < HEAD_DIM)[None, :]
            if part != 1:
                is_read = is_read & is_used[:, None]
            k = tl.load(keys + offsets, mask=is_read, other=0.0)
            scores = dot(q, tl.trans(k))
            if HAS_SOFTCAP:
                scores = tanh(scores * scale_in_cap) * softcap
            else:
                scores = scores * scale
            if part != 1:
                is_seen = slots[None, :] <= positions[:, None]
                if WINDOW > 0:
                    is_seen = is_seen & (slots[None, :] > positions[:, None] - WINDOW)
                scores = tl.where(is_seen, scores, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            # A query whose window begins later has seen nothing yet: its maximum is -inf.
            base = new_top
            if WINDOW > 0:
                base = tl.where(new_top == -float("inf"), 0.0, new_top)
            weights = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(top - base)
            total = total * shrink + tl.sum(weights, axis=1)
            v = tl.load(values + offsets, mask=is_read, other=0.0)
            acc = dot_add(weights.to(v.dtype), v, acc * shrink[:, None])
            top = new_top
    if sinks is not None:
        sink = tl.load(sinks + heads) * LOG2_E
        total += tl.exp2(sink - top)
    acc = acc / total[:, None]
    target = output + (tokens * num_heads + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, acc.to(output.dtype.element_ty), mask=in_tile)

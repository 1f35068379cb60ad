"""Attention over a paged cache of latents, for all heads at once (DeepSeek-V2, DeepSeek-AI 2024).

    key of a slot:  [ latent (RANK) | rotated (ROPE) ]        its value: the latent

One KV head serves all query heads, so a tile of slots is read once for as many (query, head) pairs
as a product has rows, and its value part is not read again. Work is divided as for other heads
(``plan.py``): single queries into splits of their slots, for 16 heads at a time; chunks into tiles
of up to 128 pairs, 64 per program, whose sums are all that fits in registers. The softmax is that
of ``decode.py`` and ``prefill.py``.
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
    persistent_programs,
    power_of_2,
    wait_for_prior_kernels,
)
from kernels.triton.merge import merge_splits
from kernels.triton.plan import describe_tile, locate_split
from kernels.triton.tiles import LOG2_E, dot, dot_add, online_softmax, rows_of_tile
from kernels.triton.work import SPLIT_SIZE, TILE_ROWS, AttentionPlan

MAX_RANK = 512
_HEADS = 16  # of a single query per program: the minimum rows of a product
_TILE = 32  # slots
# (query, head) pairs of a chunk, and slots of a tile: the first that fit in shared memory.
_CHUNK_TILES = ((64, _TILE), (64, _TILE // 2), (32, _TILE // 2))
_PROGRAMS = 2  # of single queries, whose sums fit in a multiprocessor


def latent_decode(
    plan: AttentionPlan,
    layer: LayerAttention,
    query: torch.Tensor,
    cache: LayerCache,
    output: torch.Tensor,
) -> None:
    """Attend for the rows with a single query, and write their results to ``output``.

    Args:
        plan: with splits for no window.
        layer: only its scale is used.
        query: [num_tokens, num_heads, rank + rope_dim] contiguous.
        cache: the layer's blocks, of one KV head.
        output: [num_tokens, num_heads, rank] contiguous; a row of length 0 is 0, and rows with
            several queries are left unchanged.
    """
    num_heads, width = query.shape[1:]
    rank, block_size = cache.values.shape[-1], cache.keys.shape[2]
    splits, (query_start, seq_lens, lines, tables, _) = plan.splits[None], plan.geometry
    num_rows, capacity = seq_lens.shape[0], splits.capacity
    partial = torch.empty((capacity, num_heads, rank), dtype=torch.float32, device=query.device)
    partial_lse = torch.empty((capacity, num_heads), dtype=torch.float32, device=query.device)
    head_tiles = -(-num_heads // _HEADS)
    launch(
        _latent_split_kernel,
        (min(capacity * head_tiles, persistent_programs(query.device, _PROGRAMS)),),
        output,
        partial,
        partial_lse,
        query,
        cache.keys,
        query_start,
        seq_lens,
        lines,
        tables,
        splits.starts,
        splits.rows,
        num_rows,
        tables.stride(0),
        layer.scale * LOG2_E.value,
        NUM_HEADS=num_heads,
        HEAD_TILES=head_tiles,
        HEADS=_HEADS,
        RANK_DIM=rank,
        ROPE_DIM=width - rank,
        RANK=dot_width(rank),
        ROPE=dot_width(width - rank),
        BLOCK_SIZE=block_size,
        SPLIT_SIZE=SPLIT_SIZE,
        TILE=_TILE,
        num_warps=4,
        num_stages=4,  # half of them for the block numbers
    )
    if plan.merges:
        merge_splits(plan, splits, layer, partial, partial_lse, output)


def latent_prefill(
    plan: AttentionPlan,
    layer: LayerAttention,
    query: torch.Tensor,
    cache: LayerCache,
    output: torch.Tensor,
) -> None:
    """Attend for the rows that the plan divides into tiles; arguments as in ``latent_decode``."""
    assert plan.tiles is not None
    num_heads, width = query.shape[1:]
    rank, block_size = cache.values.shape[-1], cache.keys.shape[2]
    tiles, tables = plan.tiles, plan.geometry.tables
    held = dot_width(rank), dot_width(width - rank)
    pairs, tile = _chunk_tile(query, sum(held))
    launch(
        _latent_prefill_kernel,
        (tiles.capacity, TILE_ROWS // pairs),
        output,
        query,
        cache.keys,
        tiles.count,
        tiles.records,
        tables,
        tables.stride(0),
        layer.scale * LOG2_E.value,
        NUM_HEADS=num_heads,
        QUERIES=TILE_ROWS // num_heads,
        PAIRS=pairs,
        RANK_DIM=rank,
        ROPE_DIM=width - rank,
        RANK=held[0],
        ROPE=held[1],
        BLOCK_SIZE=block_size,
        TILE=tile,
        num_warps=8,
        num_stages=2,
    )


def _chunk_tile(query: torch.Tensor, width: int) -> tuple[int, int]:
    """Return the pairs and slots of a chunk's tile: of queries, weights and keys, the latter copied
    while others are multiplied."""
    for pairs, slots in _CHUNK_TILES:
        numbers = pairs * (width + slots) + slots * width
        if fits(query.device, numbers * query.itemsize):
            return pairs, slots
    return _CHUNK_TILES[-1]


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
def _latent_split_kernel(
    output,
    partial,  # [capacity, heads, rank] float32, softmax-weighted means of a split
    partial_lse,  # [capacity, heads] float32, log2 of the split's sum of 2^score
    query,
    keys,
    query_start,
    seq_lens,
    lines,  # of the tables
    tables,
    split_starts,
    split_rows,
    num_rows,
    table_stride,
    scale,  # times log2 e
    NUM_HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    HEADS: tl.constexpr,
    RANK_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Process work items until none is left: a split, for some heads."""
    wait_for_prior_kernels()
    num_items = tl.load(split_starts + num_rows) * HEAD_TILES
    ranks = tl.arange(0, RANK)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        split = item // HEAD_TILES
        heads = (item - split * HEAD_TILES) * HEADS + tl.arange(0, HEADS)
        is_head = heads < NUM_HEADS
        row, run, num_splits = locate_split(  # pyright: ignore[reportGeneralTypeIssues]
            split, split_starts, split_rows
        )
        seq_len = tl.load(seq_lens + row)
        begin = run * SPLIT_SIZE
        token = tl.load(query_start + row).to(tl.int64)
        pairs = token * NUM_HEADS + heads
        mean, lse = _attend_latents(
            query,
            keys,
            tables + tl.load(lines + row).to(tl.int64) * table_stride,
            pairs,
            is_head,
            heads * 0 + seq_len - 1,
            begin,
            tl.minimum(begin + SPLIT_SIZE, seq_len),
            scale,
            RANK_DIM,
            ROPE_DIM,
            RANK,
            ROPE,
            HEADS,
            BLOCK_SIZE,
            TILE,
        )
        in_tile = is_head[:, None] & (ranks < RANK_DIM)[None, :]
        if num_splits == 1:
            place = output + pairs[:, None] * RANK_DIM + ranks[None, :]
            tl.store(place, mean.to(output.dtype.element_ty), mask=in_tile)
        else:
            at = split.to(tl.int64) * NUM_HEADS + heads
            tl.store(partial + at[:, None] * RANK_DIM + ranks[None, :], mean, mask=in_tile)
            tl.store(partial_lse + at, lse, mask=is_head)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["num_tiles", "tables"],
)
def _latent_prefill_kernel(
    output,
    query,
    keys,
    num_tiles,
    tiles,
    tables,
    table_stride,
    scale,  # times log2 e
    NUM_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    PAIRS: tl.constexpr,
    RANK_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Some (query, head) pairs of a query tile."""
    wait_for_prior_kernels()
    tile = tl.program_id(0)
    first_query, num_queries, begin, seq_len, line = describe_tile(tile, tiles)
    # The grid has an upper bound of the tiles.
    if tile >= tl.load(num_tiles):
        return
    place = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    local = first_query + place // NUM_HEADS
    is_pair = (place < QUERIES * NUM_HEADS) & (local < num_queries)
    pairs = (begin + local).to(tl.int64) * NUM_HEADS + place % NUM_HEADS
    # Rows without a pair use the last one's position, which keeps their softmax finite.
    last_query = tl.minimum(first_query + QUERIES, num_queries) - 1
    positions = seq_len - num_queries + tl.minimum(local, last_query)
    mean, _ = _attend_latents(  # pyright: ignore[reportGeneralTypeIssues]
        query,
        keys,
        tables + line.to(tl.int64) * table_stride,
        pairs,
        is_pair,
        positions,
        0,
        seq_len - num_queries + last_query + 1,
        scale,
        RANK_DIM,
        ROPE_DIM,
        RANK,
        ROPE,
        PAIRS,
        BLOCK_SIZE,
        TILE,
    )
    ranks = tl.arange(0, RANK)
    target = output + pairs[:, None] * RANK_DIM + ranks[None, :]
    in_tile = is_pair[:, None] & (ranks < RANK_DIM)[None, :]
    tl.store(target, mean.to(output.dtype.element_ty), mask=in_tile)


@triton.jit
def _attend_latents(
    query,
    keys,
    table,
    pairs,  # [ROWS] rows of the queries viewed as [tokens * heads, width]
    is_pair,
    positions,  # [ROWS]
    begin,  # a multiple of TILE
    end,
    scale,
    RANK_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the mean latent of slots [begin, end) that each pair attends to, and log2 of its
    weight."""
    WIDTH: tl.constexpr = RANK_DIM + ROPE_DIM
    ranks, ropes = tl.arange(0, RANK), tl.arange(0, ROPE)
    in_rank, in_rope = (ranks < RANK_DIM)[None, :], (ropes < ROPE_DIM)[None, :]
    place = query + pairs[:, None] * WIDTH
    q = tl.load(place + ranks[None, :], mask=is_pair[:, None] & in_rank, other=0.0)
    turned = place + RANK_DIM + ropes[None, :]
    q_rope = tl.load(turned, mask=is_pair[:, None] & in_rope, other=0.0)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, RANK], tl.float32)
    for tile in range(begin, end, TILE):
        slots = tile + tl.arange(0, TILE)
        # Slots past the end are unowned and may hold anything: they are not read.
        is_used = slots < end
        first_row, rows = rows_of_tile(table, tile, is_used, 0, 1, BLOCK_SIZE, TILE)
        base = keys + first_row * WIDTH + rows[:, None] * WIDTH
        k = tl.load(base + ranks[None, :], mask=is_used[:, None] & in_rank, other=0.0)
        k_turned = base + RANK_DIM + ropes[None, :]
        k_rope = tl.load(k_turned, mask=is_used[:, None] & in_rope, other=0.0)
        scores = dot_add(q_rope, tl.trans(k_rope), dot(q, tl.trans(k)))
        is_seen = is_used[None, :] & (slots[None, :] <= positions[:, None])
        scores = tl.where(is_seen, scores, -float("inf"))
        weights, shrink, top, total = online_softmax(scores, scale, top, total, False)
        acc = dot_add(weights.to(k.dtype), k, acc * shrink[:, None])
    # A row of length 0 is padding: its mean is 0.
    total = tl.where(total > 0.0, total, 1.0)
    return acc / total[:, None], top + tl.log2(total)


def latent_rope_store(
    query: torch.Tensor,
    latent: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor],
    cache: LayerCache,
    slot_mapping: torch.Tensor,
) -> None:
    """One launch; see ``kernels.reference.fused``. Queries and latents are contiguous."""
    num_tokens, num_heads, width = query.shape
    rank = norm_weight.shape[0]
    half = (width - rank) // 2
    launch(
        _latent_rope_store_kernel,
        (num_tokens,),
        query,
        latent,
        norm_weight,
        *rotation,
        cache.keys,
        slot_mapping,
        eps,
        latent.stride(0),
        NUM_HEADS=num_heads,
        HEADS=power_of_2(num_heads),
        RANK_DIM=rank,
        RANK=power_of_2(rank),
        HALF_DIM=half,
        HALF=power_of_2(half),
        num_warps=4,
    )


@triton.jit
def _latent_rope_store_kernel(
    query,
    latent,
    norm_weight,
    cos,
    sin,
    keys,
    slot_mapping,
    eps,
    latent_stride,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK_DIM: tl.constexpr,
    RANK: tl.constexpr,
    HALF_DIM: tl.constexpr,
    HALF: tl.constexpr,
):
    """One token: the rotated part of its queries and its key, as two halves, and its latent."""
    wait_for_prior_kernels()
    token = tl.program_id(0).to(tl.int64)
    width: tl.constexpr = RANK_DIM + 2 * HALF_DIM
    dims, ranks, heads = tl.arange(0, HALF), tl.arange(0, RANK), tl.arange(0, HEADS)
    in_half, in_rank = dims < HALF_DIM, ranks < RANK_DIM
    c = tl.load(cos + token * HALF_DIM + dims, mask=in_half, other=0.0)
    s = tl.load(sin + token * HALF_DIM + dims, mask=in_half, other=0.0)

    place = query + (token * NUM_HEADS + heads[:, None]) * width + RANK_DIM + dims[None, :]
    is_query = (heads < NUM_HEADS)[:, None] & in_half[None, :]
    first = tl.load(place, mask=is_query, other=0.0).to(tl.float32)
    second = tl.load(place + HALF_DIM, mask=is_query, other=0.0).to(tl.float32)
    turned = first * c[None, :] - second * s[None, :]
    other = second * c[None, :] + first * s[None, :]
    tl.store(place, turned.to(query.dtype.element_ty), mask=is_query)
    tl.store(place + HALF_DIM, other.to(query.dtype.element_ty), mask=is_query)

    slot = tl.load(slot_mapping + token)
    own = latent + token * latent_stride
    x = tl.load(own + ranks, mask=in_rank, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / RANK_DIM + eps)
    by = tl.load(norm_weight + ranks, mask=in_rank, other=0.0).to(tl.float32)
    key = keys + slot * width
    is_stored = slot >= 0
    tl.store(key + ranks, (x * scale * by).to(keys.dtype.element_ty), mask=in_rank & is_stored)
    key_first = tl.load(own + RANK_DIM + dims, mask=in_half, other=0.0).to(tl.float32)
    key_second = tl.load(own + RANK_DIM + HALF_DIM + dims, mask=in_half, other=0.0)
    key_second = key_second.to(tl.float32)
    key += RANK_DIM
    is_turned = in_half & is_stored
    key_turned = (key_first * c - key_second * s).to(keys.dtype.element_ty)
    tl.store(key + dims, key_turned, mask=is_turned)
    key_other = (key_second * c + key_first * s).to(keys.dtype.element_ty)
    tl.store(key + HALF_DIM + dims, key_other, mask=is_turned)

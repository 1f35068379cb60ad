"""Paged attention of prompt chunks: many queries per row, ragged, with padding only at tile ends.

This is FlashAttention-2 (Dao 2023) over the blocks of PagedAttention (Kwon et al. 2023). A tile has
adjacent queries of one row with all the heads that share a KV head; its rows are ``query * group +
head``, so a short chunk of a model with large groups still fills the matrix units.

    keys:   | outside the window | window's edge |   seen by all   | diagonal | future |
            |      skipped       |    masked     | no mask at all  |  masked  | skipped|

For heads of up to 128, both products of a tile run while other units compute its neighbours'
weights, which takes about as long (``prefill_loops.py``). Wider heads lack the registers for this,
codes are widened in shared memory that every tile needs at once, and GPUs other than Hopper await
each product.

Such tiles have 128 rows, and a multiprocessor has registers for one. Two of 64 rows would fill each
other's gaps, above all where one begins or ends; but each copies keys and values for itself: 64 KiB
in the 1,024 cycles of their products. That is twice the 25 to 30 bytes per cycle that the
second-level cache has been seen to give a multiprocessor. ``kernels/bench/variants.py`` times both.

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

from kernels.attention import AttentionSpec, LayerAttention, LayerCache
from kernels.triton.launch import (
    dot_width,
    has_group_products,
    launch,
    wait_for_prior_kernels,
)
from kernels.triton.plan import TILE_ROWS, AttentionPlan
from kernels.triton.prefill_loops import attend_ahead, attend_in_turn
from kernels.triton.tiles import LOG2_E

_TILE = 64
_AHEAD_ROWS = TILE_ROWS  # of a tile with products in flight; or LOW_TILE_ROWS, see above
_MAX_SUMS = 256  # of a value's numbers per program


def prefill_tile_rows(spec: AttentionSpec) -> int:
    """Return the rows of a query tile."""
    is_coded = spec.cache_dtype is not None
    if not _is_ahead(dot_width(spec.head_dim), spec.dtype, spec.device, is_coded=is_coded):
        return TILE_ROWS
    return _AHEAD_ROWS if spec.num_heads // spec.num_kv_heads <= _AHEAD_ROWS else TILE_ROWS


def _is_ahead(dim: int, dtype: torch.dtype, device: torch.device, *, is_coded: bool) -> bool:
    """Return whether products stay in flight."""
    return dim <= 128 and dtype.itemsize == 2 and not is_coded and has_group_products(device)


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
    tiles, (query_start, seq_lens, lines, tables, ends) = plan.tiles, plan.geometry
    dim, is_coded = dot_width(head_dim), cache.key_scales is not None
    # float32 takes twice the bytes; it need not be fast, but it has to fit.
    is_wide = query.dtype.itemsize > 2
    sums = min(dim, _MAX_SUMS)
    # Widened tiles of wide heads would not fit in registers, the widest not in shared memory.
    is_half = is_wide or dim > sums or (dim > 128 and is_coded)
    is_ahead = _is_ahead(dim, query.dtype, query.device, is_coded=is_coded)
    launch(
        _prefill_kernel,
        (tiles.capacity * num_kv_heads, dim // sums),
        output,
        query,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        query_start,
        seq_lens,
        lines,
        tables,
        tiles.starts,
        tiles.rows,
        ends if layer.is_bidirectional else None,
        layer.sinks,
        seq_lens.shape[0],
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
        ROWS=plan.tile_rows,
        TILE=_TILE // 2 if is_half else _TILE,
        WINDOW=layer.window or 0,
        HAS_SOFTCAP=layer.softcap is not None,
        IS_AHEAD=is_ahead,
        num_warps=plan.tile_rows // 16,
        num_stages=_num_stages(plan.tile_rows, is_small=dim <= 128 and not is_wide),
    )


def _num_stages(tile_rows: int, *, is_small: bool) -> int:
    if not is_small:
        return 2
    return 5 if tile_rows == TILE_ROWS else 3


# Arguments that change from step to step are not specialised on: see plan.py.
@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=[
        "query_start",
        "seq_lens",
        "lines",
        "tables",
        "tile_starts",
        "tile_rows",
        "ends",
    ],
)
def _prefill_kernel(
    output,
    query,
    keys,
    values,
    key_scales,  # None unless the cache is quantised
    value_scales,
    query_start,
    seq_lens,
    lines,  # of the tables
    tables,
    tile_starts,
    tile_rows,
    ends,  # None: queries attend up to themselves
    sinks,
    num_rows,
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
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_AHEAD: tl.constexpr,
):
    """One query tile of one KV head, and ``SUMS`` elements of each value."""
    wait_for_prior_kernels()
    tile, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    # The grid has an upper bound of the tiles.
    if tile >= tl.load(tile_starts + num_rows):
        return
    QUERIES: tl.constexpr = ROWS // GROUP
    row = tl.load(tile_rows + tile)
    begin, seq_len = tl.load(query_start + row), tl.load(seq_lens + row)
    num_queries = tl.load(query_start + row + 1) - begin
    past = seq_len - num_queries
    # A row's last tile has the most keys: it starts first, so that it does not finish alone.
    first_query = (tl.load(tile_starts + row + 1) - 1 - tile) * QUERIES
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
        unmasked = tl.minimum(unmasked, end)
    seen_by_all = tl.maximum(seen_by_all, unmasked)
    first_seen = first_position - WINDOW + 1
    table = tables + tl.load(lines + row).to(tl.int64) * table_stride
    value_dims = dims
    if SUMS < DIM:
        value_dims = tl.program_id(1) * SUMS + tl.arange(0, SUMS)
    if IS_AHEAD:
        acc, top, total = attend_ahead(
            *(q, keys, values, table, kv_head, seq_len, lowest, unmasked, seen_by_all, end),
            *(first_seen, positions, last_seen, scale_in_cap if HAS_SOFTCAP else scale, softcap),
            *(NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, HAS_SOFTCAP),
        )
    else:
        acc, top, total = attend_in_turn(
            *(q, keys, values, key_scales, value_scales, table, kv_head, seq_len),
            *(lowest, unmasked, seen_by_all, end, first_seen, positions, last_seen),
            *(scale, softcap, scale_in_cap),
            *(NUM_KV_HEADS, HEAD_DIM, SUMS, BLOCK_SIZE, TILE, WINDOW, HAS_SOFTCAP),
        )
    if sinks is not None:
        sink = tl.load(sinks + heads) * LOG2_E
        total += tl.exp2(sink - top)
    # A row of length 0 is padding: its output is 0.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    target = output + (tokens * num_heads + heads)[:, None] * HEAD_DIM + value_dims[None, :]
    is_made = is_query[:, None] & (value_dims < HEAD_DIM)[None, :]
    tl.store(target, acc.to(output.dtype.element_ty), mask=is_made)

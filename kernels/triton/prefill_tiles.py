"""Attention of a tile of queries to keys and values that Hopper's TMA copies, for ``prefill.py``.

Two programs share a multiprocessor where each has 128 registers a thread. A tile's scores, its
weights and the sums leave few of them for addresses, and with too many of these the assembler makes
each product wait for the one before. TMA, the hardware that copies whole tiles, needs no more than
the number of a tile's first row. The registers would not suffice either if the product of weights
and values were in flight beside the next scores: its operands are kept until it ends.

    a turn:     weights of tile i | sums of tile i | scores of tile i + 1 | copies start
    uses:             -           |    values i    |      keys i + 1      | values i + 1, keys i + 2

Copies start where a turn ends. So that nothing has to wait for them where the next begins, a turn
begins with the weights of scores that the turn before has left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.attention import LayerCache
from kernels.triton.launch import has_group_products
from kernels.triton.tiles import (
    complete,
    dot,
    dot_add,
    online_softmax,
    part_of_keys,
    tanh,
)


def are_copied_whole(query: torch.Tensor, cache: LayerCache, tile: int) -> bool:
    """Return whether a tile is one copy, of numbers that are multiplied as they are."""
    block_size, head_dim = cache.keys.shape[2:]
    return (
        has_group_products(query.device)
        and cache.keys.dtype == query.dtype
        and head_dim in (64, 128)
        and block_size % tile == 0
    )


def tiles_of(cache: torch.Tensor, tile: int) -> TensorDescriptor:
    """Describe keys or values, viewed as [rows, head_dim], in tiles of this many rows."""
    head_dim = cache.shape[-1]
    rows = cache.numel() // head_dim
    return TensorDescriptor(cache, [rows, head_dim], [head_dim, 1], [tile, head_dim])


@triton.jit
def attend_to_tiles(
    q,
    key_tiles,
    value_tiles,
    table,
    kv_head,
    first_row,  # of slot ``lowest``, in the cache
    seq_len,
    lowest,
    unmasked,
    seen_by_all,
    end,
    positions,
    last_seen,
    scale,
    softcap,
    scale_in_cap,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Attend with a tile's queries (prefill.py).

    What lies past a sequence's end belongs to nobody, and may be no number. As keys it makes scores
    that are not used. As values it is replaced in the last tile, through registers.

    Returns:
        Sums of weighted values [rows, head_dim], tops and totals [rows], float32.
    """
    ROWS: tl.constexpr = q.shape[0]
    DIM: tl.constexpr = q.shape[1]
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    last = tl.maximum(end - 1, 0) // TILE * TILE
    row = first_row
    scores = dot(q, tl.trans(key_tiles.load([row, 0])))
    FIRST_PART: tl.constexpr = 0 if WINDOW > 0 else 1
    for part in tl.static_range(FIRST_PART, 3):
        part_begin, part_end = part_of_keys(lowest, unmasked, seen_by_all, end, part, False)
        for begin in range(part_begin, tl.minimum(part_end, last), TILE):
            if HAS_SOFTCAP:
                scores = tanh(scores * scale_in_cap)
            if part != 1:
                slots = begin + tl.arange(0, TILE)
                scores = only_seen(scores, slots, positions, last_seen, WINDOW)
            weights, shrink, top, total = online_softmax(
                scores, softcap if HAS_SOFTCAP else scale, top, total, WINDOW > 0
            )
            v = value_tiles.load([row, 0])
            acc = complete(dot_add(weights.to(v.dtype), v, acc * shrink[:, None]))
            row = row_of_slot(table, begin + TILE, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
            scores = dot(q, tl.trans(key_tiles.load([row, 0])))
    if HAS_SOFTCAP:
        scores = tanh(scores * scale_in_cap)
    slots = last + tl.arange(0, TILE)
    scores = only_seen(scores, slots, positions, last_seen, WINDOW)
    # A row of length 0 sees nothing here.
    weights, shrink, top, total = online_softmax(
        scores, softcap if HAS_SOFTCAP else scale, top, total, True
    )
    v = tl.where((slots < seq_len)[:, None], value_tiles.load([row, 0]), 0.0)
    return dot_add(weights.to(v.dtype), v, acc * shrink[:, None]), top, total


@triton.jit
def row_of_slot(table, begin, kv_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The row of slot ``begin`` in a cache viewed as [rows, head_dim]."""
    block = tl.load(table + begin // BLOCK_SIZE)
    return (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + begin % BLOCK_SIZE


@triton.jit
def only_seen(scores, slots, positions, last_seen, WINDOW: tl.constexpr):
    """[rows, slots]; -inf for slots that a row's query does not see."""
    is_seen = slots[None, :] <= last_seen[:, None]
    if WINDOW > 0:
        is_seen = is_seen & (slots[None, :] > positions[:, None] - WINDOW)
    return tl.where(is_seen, scores, -float("inf"))

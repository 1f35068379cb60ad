"""The loops over a prompt tile's keys (``prefill.py``): in turn, and with products in flight.

``attend_in_turn`` computes a tile's scores S, its weights W and their product with the values, P,
one after the other. In ``attend_ahead`` an iteration starts P of the tile before and S of the tile
after, and awaits them where the next one begins:

    matrix units:    | P(j - 2)  S(j) | P(j - 1)  S(j + 1) | P(j)  S(j + 2) |
    other units:     |    W(j - 1)    |       W(j)         |    W(j + 1)    |

Both take about as long (FlashAttention-3, Shah et al. 2024; there only P is beside a group's own W,
and two groups of warps take turns). Sums are in the same order of tiles.

Whether products stay in flight depends on two compilers:

- Triton awaits one at once if the loop does more with it than yield it, and also unless its first
  use in the next iteration comes after a product that is awaited. S and P are yielded; ``_await``
  is a third product, of one instruction, which adds nothing.
- ptxas awaits each if others read the sums' registers between the start of the first and the wait.
  Hence sums are rescaled before both, and scores copied (``_held``), which also spares a second set
  of registers.

No compiler checks that a product's operands in registers stay as they are until it is awaited:
weights must be rounded after ``_await``. The tests of compiled kernels look at all of this.

The next tile's keys need no mask: their memory exists, and scores of what lies past a sequence's
end or behind a window are replaced. Values need one: what is no number there would not vanish when
multiplied by 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.launch import INTERPRETED
from kernels.triton.tiles import (
    dot,
    dot_add,
    load_rows,
    online_softmax,
    rows_of_tile,
    softmax_weights,
    tanh,
)

_IS_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
_LEAST: tl.constexpr = tl.constexpr(16)  # columns of a product of groups of warps


@triton.jit
def attend_ahead(
    q,  # [rows, DIM], and so on as in prefill.py
    keys,
    values,
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
    factor,  # of the scores: scale / softcap if there is a cap, otherwise the scale
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Attend with a tile's products beside its neighbours' weights; the cache has no codes.

    Returns:
        Sums of weighted values [rows, DIM], tops and totals [rows], float32.
    """
    ROWS: tl.constexpr = q.shape[0]
    HAS_OTHERS: tl.constexpr = WINDOW > 0 and BLOCK_SIZE % TILE != 0
    IS_IN_BLOCK: tl.constexpr = BLOCK_SIZE % TILE == 0
    dims = tl.arange(0, q.shape[1])
    in_tile = tl.arange(0, TILE)
    is_dim = (dims < HEAD_DIM)[None, :]
    offsets = in_tile[:, None] * HEAD_DIM + dims[None, :]
    top = tl.full([ROWS], -float("inf"), tl.float32)
    # Each thread adds up weights of its own columns.
    totals = tl.zeros([ROWS, _LEAST], tl.float32)
    acc = tl.zeros([ROWS, q.shape[1]], tl.float32)
    # Of the tile before, of which the first has none.
    weights = tl.zeros([ROWS, TILE], tl.float32)
    shrink = tl.full([ROWS], 1.0, tl.float32)

    last = tl.maximum(end - 1, 0) // TILE * TILE
    is_used = lowest + in_tile < seq_len  # nothing, in a row of length 0
    if HAS_OTHERS:
        is_used = is_used & (lowest + in_tile >= first_seen)
    first_row, rows = rows_of_tile(table, lowest, is_used, kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE)
    places = rows[:, None] * HEAD_DIM + dims[None, :]
    k = load_rows(keys + first_row * HEAD_DIM + places, is_dim & is_used[:, None], q.dtype)
    scores = dot(q, tl.trans(k))
    if IS_IN_BLOCK:
        # A block's number is read once: for its keys, and two iterations later for its values.
        block = tl.load(table + lowest // BLOCK_SIZE)
        line = block.to(tl.int64) * NUM_KV_HEADS + kv_head  # of the tile before

    for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
        if part == 0:
            part_begin, part_end = lowest, unmasked
        elif part == 1:
            part_begin, part_end = unmasked, seen_by_all
        else:
            part_begin, part_end = seen_by_all, end
        for begin in range(part_begin, part_end, TILE):
            totals = _await(totals, q.dtype)
            own = _held(scores, factor)
            acc = acc * shrink[:, None]

            after = tl.minimum(begin + TILE, last)  # the last tile's scores are computed twice
            if IS_IN_BLOCK:
                next_block = tl.load(table + after // BLOCK_SIZE)
                next_line = next_block.to(tl.int64) * NUM_KV_HEADS + kv_head
                next_row = next_line * BLOCK_SIZE + after % BLOCK_SIZE
                k = load_rows(keys + next_row * HEAD_DIM + offsets, is_dim, q.dtype)
            else:
                is_used = after + in_tile < seq_len
                if HAS_OTHERS:
                    is_used = is_used & (after + in_tile >= first_seen)
                first_row, rows = rows_of_tile(
                    table, after, is_used, kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE
                )
                places = rows[:, None] * HEAD_DIM + dims[None, :]
                k = load_rows(keys + first_row * HEAD_DIM + places, is_dim, q.dtype)
            scores = dot(q, tl.trans(k))

            before = tl.maximum(begin - TILE, lowest)
            if IS_IN_BLOCK:
                is_value = is_dim
                if part != 1:
                    is_value = is_dim & (before + in_tile < seq_len)[:, None]
                row = line * BLOCK_SIZE + before % BLOCK_SIZE
                v = load_rows(values + row * HEAD_DIM + offsets, is_value, q.dtype)
                line = block.to(tl.int64) * NUM_KV_HEADS + kv_head
                block = next_block
            else:
                v = values_of_tile(
                    *(values, table, before, first_seen, seq_len, kv_head, dims),
                    *(part != 1, HAS_OTHERS, q.dtype),
                    *(NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE),
                )
            acc = dot_add(weights.to(q.dtype), v, acc)

            if HAS_SOFTCAP:
                own = tanh(own) * softcap
            if part != 1:
                own = _only_seen(own, begin + in_tile, positions, last_seen, WINDOW)
            # A query whose window begins later has seen nothing yet.
            weights, shrink, top = softmax_weights(own, 1.0, top, WINDOW > 0)
            columns = tl.reshape(weights, [ROWS, TILE // _LEAST, _LEAST])
            totals = totals * shrink[:, None] + tl.sum(columns, axis=1)
    if IS_IN_BLOCK:
        row = line * BLOCK_SIZE + last % BLOCK_SIZE
        is_value = is_dim & (last + in_tile < seq_len)[:, None]
        v = load_rows(values + row * HEAD_DIM + offsets, is_value, q.dtype)
    else:
        v = values_of_tile(
            *(values, table, last, first_seen, seq_len, kv_head, dims),
            *(True, HAS_OTHERS, q.dtype),
            *(NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE),
        )
    acc = dot_add(weights.to(q.dtype), v, acc * shrink[:, None])
    return acc, top, tl.sum(totals, axis=1)


@triton.jit
def _await(totals, DTYPE: tl.constexpr):
    """Return [rows, 16] sums as they are, when the products in flight are complete."""
    left = tl.zeros([totals.shape[0], _LEAST], DTYPE)
    right = tl.zeros([_LEAST, _LEAST], DTYPE)
    return dot_add(left, right, totals)


@triton.jit
def _held(scores, factor):
    """``scores * factor``, in other registers and at this place, where compilers would move it to
    its use, after the start of products that overwrite ``scores``."""
    if _IS_INTERPRETED:
        return scores * factor
    else:
        return tl.inline_asm_elementwise(
            "mul.f32 $0, $1, $2;",
            "=f,f,f",
            [scores, factor],
            dtype=tl.float32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def attend_in_turn(
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
    """Attend to any cache, for ``SUMS`` elements of each value: those of the program's part.

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
        if SUMS < DIM:
            part_begin, part_end = lowest, end
        elif part == 0:
            part_begin, part_end = lowest, unmasked
        elif part == 1:
            part_begin, part_end = unmasked, seen_by_all
        else:
            part_begin, part_end = seen_by_all, end
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
                scores = _only_seen(scores, slots, positions, last_seen, WINDOW)
            weights, shrink, top, total = online_softmax(
                scores, softcap if HAS_SOFTCAP else scale, top, total, WINDOW > 0
            )
            if value_scales is not None:
                value_scale = tl.load(value_scales + first_row + rows, mask=is_used, other=0.0)
                weights *= value_scale[None, :]
            v = values_of_tile(
                *(values, table, begin, first_seen, seq_len, kv_head, value_dims),
                *(part != 1, HAS_OTHERS, q.dtype),
                *(NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE),
            )
            acc = dot_add(weights.to(v.dtype), v, acc * shrink[:, None])
    return acc, top, total


@triton.jit
def _only_seen(scores, slots, positions, last_seen, WINDOW: tl.constexpr):
    """[rows, slots]; -inf for slots that a row's query does not see."""
    is_seen = slots[None, :] <= last_seen[:, None]
    if WINDOW > 0:
        is_seen = is_seen & (slots[None, :] > positions[:, None] - WINDOW)
    return tl.where(is_seen, scores, -float("inf"))


@triton.jit
def values_of_tile(
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

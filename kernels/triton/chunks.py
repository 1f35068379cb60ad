"""Device functions of recurrent layers that process a prompt's tokens in chunks.

    row 0: | chunk 0 | chunk 1 | 2 |    row 1: too short    row 2: | chunk 3 | chunk 4 |

A row's chunks begin at its first token of the step. Rows of few tokens have no chunks: they are
processed token by token (``recurrent.py``), like every decode step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.launch import INTERPRETED

_ROWS: tl.constexpr = tl.constexpr(256)
_UPCAST: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def _num_chunks(query_start, rows, is_row, CHUNK: tl.constexpr, LEAST: tl.constexpr):
    begin = tl.load(query_start + rows, mask=is_row, other=0)
    length = tl.load(query_start + rows + 1, mask=is_row, other=0) - begin
    return tl.where(length >= LEAST, tl.cdiv(length, CHUNK), 0)


@triton.jit
def row_of_chunk(chunk, query_start, num_rows, CHUNK: tl.constexpr, LEAST: tl.constexpr):
    """Return the row of a chunk, and the chunk's number in it; ``num_rows`` past the last chunk."""
    row, first, before = chunk * 0, chunk * 0, chunk * 0
    for begin in range(0, num_rows, _ROWS):
        rows = begin + tl.arange(0, _ROWS)
        counts = _num_chunks(query_start, rows, rows < num_rows, CHUNK, LEAST)
        ends = before + tl.cumsum(counts, axis=0)
        is_before = (ends <= chunk) & (rows < num_rows)
        row += tl.sum(is_before.to(tl.int32), axis=0)
        first = tl.maximum(first, tl.max(tl.where(is_before, ends, 0), axis=0))
        before += tl.sum(counts, axis=0)
    return row, chunk - first


@triton.jit
def chunks_before(row, query_start, CHUNK: tl.constexpr, LEAST: tl.constexpr):
    """Return the number of chunks in the rows before ``row``."""
    counts = tl.zeros([_ROWS], tl.int32)
    for begin in range(0, row, _ROWS):
        rows = begin + tl.arange(0, _ROWS)
        counts += _num_chunks(query_start, rows, rows < row, CHUNK, LEAST)
    return tl.sum(counts, axis=0)


@triton.jit
def decay_prefix_sums(logs, CHUNK: tl.constexpr):
    """Return the prefix sums of a chunk's log decays [CHUNK], which are 0 after its last token, and
    the total.

    What remains after a decay of e^-50 is below all rounding. The clamp keeps the sums small, of
    which only differences count.
    """
    bounded = tl.maximum(logs, -50.0, propagate_nan=tl.PropagateNan.ALL)
    since = tl.cumsum(bounded, axis=0)
    # Not a separate sum, in another order: the last token must not decay its own contribution.
    return since, tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, since, 0.0), axis=0)


@triton.jit
def decays(since, CHUNK: tl.constexpr):
    """Return the decay at a chunk's token t of what token i wrote: [t, i], 0 if i is later.

    ``since`` [CHUNK] is the log decay of the state before the chunk.
    """
    places = tl.arange(0, CHUNK)
    is_seen = places[:, None] >= places[None, :]
    # For later tokens the exponential could overflow.
    return tl.where(is_seen, tl.exp(tl.where(is_seen, since[:, None] - since[None, :], 0.0)), 0.0)


@triton.jit
def product(a, b, DTYPE: tl.constexpr):
    """``a @ b`` in float32; each operand is in the model's ``DTYPE`` or float32.

    If that is bfloat16, float32 operands are split for the matrix units into a bfloat16 and the
    remainder, 16 bits together; numbers in the model's dtype are exact. The product of two
    remainders is omitted.
    """
    if _UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif a.dtype == b.dtype and a.dtype != tl.float32:
        return tl.dot(a, b)
    elif DTYPE != tl.bfloat16:  # noqa: SIM300
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3")
    elif a.dtype == tl.bfloat16:
        high = b.to(tl.bfloat16)
        low = (b - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(a, low, tl.dot(a, high))
    else:
        high = a.to(tl.bfloat16)
        low = (a - high.to(tl.float32)).to(tl.bfloat16)
        if b.dtype == tl.bfloat16:
            return tl.dot(low, b, tl.dot(high, b))
        else:
            return tl.dot(low, b.to(tl.bfloat16), product(high, b, DTYPE))


@triton.jit
def add_product(total, a, b):
    """``total + a @ b`` in float32, where a and b are in the model's dtype."""
    if _UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total)


@triton.jit
def inverse_of_triangle(a, CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """Return ``(1 + a)^-1`` of a strictly lower triangle [CHUNK, CHUNK].

    Blocks of 16 along the diagonal are inverted by elimination, all at once. With T these inverses
    and L the blocks below them, ``(1 + a)^-1 = (1 + T L)^-1 T``; with four by four blocks, the
    fourth power of T L is zero.
    """
    SIDE: tl.constexpr = CHUNK // 4
    square, place = tl.arange(0, 4), tl.arange(0, SIDE)
    is_diagonal = square[:, None, None, None] == square[None, None, :, None]
    own = tl.sum(tl.where(is_diagonal, tl.reshape(a, [4, SIDE, 4, SIDE]), 0.0), axis=2)
    inverse = tl.where(place[None, :, None] == place[None, None, :], 1.0, own * 0.0)
    for j in range(0, SIDE - 1):
        column = tl.sum(tl.where(place[None, None, :] == j, own, 0.0), axis=2)
        line = tl.sum(tl.where(place[None, :, None] == j, inverse, 0.0), axis=1)
        inverse -= column[:, :, None] * line[:, None, :]
    whole = tl.where(is_diagonal, tl.expand_dims(inverse, 2), 0.0)
    t = tl.reshape(whole, [CHUNK, CHUNK])
    places = tl.arange(0, CHUNK) // SIDE
    m = product(t, tl.where(places[:, None] > places[None, :], a, 0.0), DTYPE)
    m_2 = product(m, m, DTYPE)
    return t + product(m_2 - m - product(m, m_2, DTYPE), t, DTYPE)

"""Device functions that the attention kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.launch import INTERPRETED

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_UPCAST: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b):
    """``a @ b`` in float32; the interpreter's own product of bf16 operands is wrong."""
    if _UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_add(a, b, acc):
    """``acc + a @ b`` in float32."""
    if _UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def load_rows(places, is_read, DTYPE: tl.constexpr):
    """Keys or values as operands of a product: codes are widened, without their scales."""
    if places.dtype.element_ty == DTYPE:
        return tl.load(places, mask=is_read, other=0.0)
    elif places.dtype.element_ty == tl.int8:
        return tl.load(places, mask=is_read, other=0).to(DTYPE)
    else:
        return tl.load(places, mask=is_read, other=0.0).to(DTYPE)


@triton.jit
def tanh(x):
    """By the exponential, which has an instruction; ends at -1 and 1 without overflow."""
    return 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(x, 40.0)) + 1.0)


@triton.jit
def sigmoid(x):
    """``1 / (1 + exp(-x))``, whose exponential stays finite."""
    return 1.0 / (1.0 + tl.exp(-tl.maximum(x, -80.0)))


@triton.jit
def silu(x):
    """``x sigmoid(x)``."""
    return x * sigmoid(x)


@triton.jit
def gelu_tanh(x):
    """``0.5 x (1 + tanh(y)) = x sigmoid(2 y)`` of ``2 y = 2 sqrt(2 / pi) (x + 0.044715 x^3)``,
    which does not cancel where y is negative."""
    return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def rows_of_tile(
    table,
    begin,
    is_used,
    head,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rows of a cache seen as [rows, head_dim] for the ``TILE`` slots of a sequence from ``begin``.

    ``begin`` is a multiple of ``TILE``: where a block holds whole tiles, all of them lie in one
    block, its number is read once, and what differs between their places is known beforehand.

    Returns:
        The sum of a first row, int64, and of [TILE] others.
    """
    places = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + begin // BLOCK_SIZE).to(tl.int64)
        return (block * NUM_KV_HEADS + head) * BLOCK_SIZE + begin % BLOCK_SIZE, places
    else:
        slots = begin + places
        blocks = tl.load(table + slots // BLOCK_SIZE, mask=is_used, other=0).to(tl.int64)
        rows = blocks * (NUM_KV_HEADS * BLOCK_SIZE) + slots % BLOCK_SIZE
        return head * BLOCK_SIZE, rows


@triton.jit
def weigh(scores, scale, top, total, MAY_SEE_NONE: tl.constexpr):
    """A tile of an online softmax to the base of two (Milakov and Gimelshein 2018; Dao 2023).

    Args:
        scores: [rows, slots] float32, -inf where a slot is not seen.
        scale: of the scores, above 0: it is laid on with the subtraction, in one instruction.
        top, total: [rows] float32, the maximum so far and the sum of weights; -inf and 0 at first.
        MAY_SEE_NONE: a row may have seen no slot yet.

    Returns:
        Weights [rows, slots], what sums so far shrink by [rows], and the new top and total.
    """
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    base = new_top
    if MAY_SEE_NONE:
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
    weights = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(top - base)
    return weights, shrink, new_top, total * shrink + tl.sum(weights, axis=1)

"""Device functions shared by kernels: products, tiles of keys, and functions of numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.codes import DECODE_FACTORS, decode_codes
from kernels.triton.launch import INTERPRETED, converts_float8

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
_E4M3_LIFT: tl.constexpr = tl.constexpr(DECODE_FACTORS["e4m3"])


@triton.jit
def dot(a, b):
    """``a @ b`` in float32; works around the interpreter's wrong product of bf16 operands."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_add(a, b, acc):
    """``acc + a @ b`` in float32."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def complete(sums):
    """``sums`` of a product, which is then not in flight beyond this place in a loop.

    Otherwise the compiler waits for it in the next turn, before its first use there, and keeps its
    operands in registers until then. This uses it, without an instruction.
    """
    if _INTERPRETED:
        return sums
    else:
        return tl.inline_asm_elementwise(
            "// $1", "=r,0", [sums], dtype=tl.float32, is_pure=True, pack=1
        )


def readable(stored: torch.Tensor) -> torch.Tensor:
    """Return keys or values for ``load_rows``: float8 as bytes if a GPU does not know it."""
    is_float8 = stored.dtype == torch.float8_e4m3fn
    return stored.view(torch.uint8) if is_float8 and not converts_float8(stored.device) else stored


@triton.jit
def load_rows(places, is_read, DTYPE: tl.constexpr):
    """Load keys or values as operands of a product: codes are widened, without their scales."""
    if places.dtype.element_ty == DTYPE:
        return tl.load(places, mask=is_read, other=0.0)
    elif places.dtype.element_ty == tl.int8:
        return tl.load(places, mask=is_read, other=0).to(DTYPE)
    elif places.dtype.element_ty == tl.uint8:  # float8, see ``readable``
        held = tl.load(places, mask=is_read, other=0)
        return (decode_codes(held, None, 0, "e4m3") * _E4M3_LIFT).to(DTYPE)
    else:
        return tl.load(places, mask=is_read, other=0.0).to(DTYPE)


@triton.jit
def quotient(x, divisor):
    """Return ``x / divisor``, correctly rounded, for a divisor that is the same for many numbers.

    A product with the reciprocal, and a correction by its remainder, which is exact (Markstein
    1990). A division of its own has a branch per number, for cases that are not found here. Two
    quotients that the reciprocal has lost remain as they are: infinite ones.
    """
    if _INTERPRETED:
        return tl.div_rn(x, divisor)  # its fma rounds twice
    else:
        inverse = tl.div_rn(1.0, divisor)
        rough = x * inverse
        rest = tl.fma(-rough, divisor, x)
        return tl.where(tl.abs(rough) < float("inf"), tl.fma(rest, inverse, rough), rough)


@triton.jit
def clamp(x, least, most):
    """``x`` within bounds. What is no number stays so: a GPU's minimum is the other number."""
    bounded = tl.maximum(x, least, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(bounded, most, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tanh(x):
    """Computed by the hardware's exponential; saturates at -1 and 1 without overflow."""
    bounded = tl.minimum(x, 40.0, propagate_nan=tl.PropagateNan.ALL)
    return 1.0 - 2.0 / (tl.exp(2.0 * bounded) + 1.0)


@triton.jit
def sigmoid(x):
    """``1 / (1 + exp(-x))``, with a finite exponential."""
    return 1.0 / (1.0 + tl.exp(-tl.maximum(x, -80.0, propagate_nan=tl.PropagateNan.ALL)))


@triton.jit
def silu(x):
    """``x sigmoid(x)``."""
    return x * sigmoid(x)


@triton.jit
def gelu_tanh(x):
    """``0.5 x (1 + tanh(y)) = x sigmoid(2 y)`` with ``2 y = 2 sqrt(2 / pi) (x + 0.044715 x^3)``,
    which does not cancel for negative y."""
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
    """Return the rows, in a cache viewed as [rows, head_dim], of ``TILE`` slots from ``begin`` on.

    ``begin`` is a multiple of ``TILE``: if a block holds whole tiles, all slots are in one block,
    its number is read once, and the offsets are known at compile time.

    Returns:
        The sum of a first row, int64, and [TILE] offsets.
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
def part_of_keys(lowest, unmasked, seen_by_all, end, PART: tl.constexpr, IS_ONE: tl.constexpr):
    """Return the first slot and the end of a part of the keys of a tile of queries (prefill.py).

    ``PART``: 0 the edge of the window, 1 what all see, 2 the diagonal. ``IS_ONE``: it has all.
    """
    if IS_ONE:
        return lowest, end
    elif PART == 0:
        return lowest, unmasked
    elif PART == 1:
        return unmasked, seen_by_all
    else:
        return seen_by_all, end


@triton.jit
def online_softmax(scores, scale, top, total, MAY_SEE_NONE: tl.constexpr):
    """Process a tile of an online softmax in base two (Milakov and Gimelshein 2018; Dao 2023).

    Args:
        scores: [rows, slots] float32, -inf for masked slots.
        scale: of the scores, above 0: applied with the subtraction, in one instruction.
        top, total: [rows] float32, the maximum so far and the sum of weights; initially -inf and 0.
        MAY_SEE_NONE: a row may have had no unmasked slot yet.

    Returns:
        Weights [rows, slots], the factors of the sums so far [rows], and the new top and total.
    """
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    base = new_top
    if MAY_SEE_NONE:
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
    weights = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(top - base)
    return weights, shrink, new_top, total * shrink + tl.sum(weights, axis=1)

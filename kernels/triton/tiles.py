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
def row_offsets(
    table,
    slots,
    is_used,
    head,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rows of a cache seen as [rows, head_dim] for ``TILE`` neighbouring slots of a sequence.

    ``slots`` starts at a multiple of ``TILE``: where a block holds whole tiles, all of them lie
    in one block and its number is read once.
    """
    if BLOCK_SIZE % TILE == 0:
        first = tl.min(slots, axis=0)
        block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
        return (block * NUM_KV_HEADS + head) * BLOCK_SIZE + slots % BLOCK_SIZE
    else:
        blocks = tl.load(table + slots // BLOCK_SIZE, mask=is_used, other=0).to(tl.int64)
        return (blocks * NUM_KV_HEADS + head) * BLOCK_SIZE + slots % BLOCK_SIZE

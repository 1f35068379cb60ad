"""Decode quantised weights to bfloat16 or float16, two to a word, where these hold levels exactly.

Most of the work in ``codes.py`` is on float32, one number at a time. Levels of few bits need none
of it: their bits are moved into pairs of 16-bit floats, and what is to be added or multiplied is
applied to both of a pair at once. In bfloat16 a code's exponent bits are the lowest of the float's,
so that the smallest levels become subnormal numbers; a factor restores all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.codes import (
    DECODE_FACTORS,
    DECODE_OFFSETS,
    HIGH,
    LOW,
    as_scale,
    decode_codes,
    e2m1,
    e4m3,
    halves,
    of_half,
)
from kernels.triton.launch import INTERPRETED

_COMPILED: tl.constexpr = tl.constexpr(not INTERPRETED)

# Four codes c to 128 + c in bfloat16, or 1024 + c in float16; ``$BASE`` is the upper byte.
_INT4_ENDS = """
    and.b32 t, t, 0x0F0F0F0F;
    prmt.b32 $0, t, $BASE, 0x4140;
    prmt.b32 $1, t, $BASE, 0x4342;
}"""


def _int4(begin: str, base: int) -> str:
    return of_half(begin, _INT4_ENDS.replace("$BASE", hex(base)), 2)


# By kind, dtype and half of a byte: from four bytes to four floats.
PAIR_INSTRUCTIONS: dict[tuple[str, str, int], str] = {
    ("int4", "bf16", 0): _int4(LOW, 0x43434343),
    ("int4", "bf16", 1): _int4(HIGH, 0x43434343),
    ("int4", "fp16", 0): _int4(LOW, 0x64646464),
    ("int4", "fp16", 1): _int4(HIGH, 0x64646464),
    ("e2m1", "bf16", 0): e2m1(LOW, -2, 0x01C001C0),
    ("e2m1", "bf16", 1): e2m1(HIGH, -2, 0x01C001C0),
    ("e4m3", "bf16", 0): e4m3(4, 0x07F007F0),
    ("e4m3", "fp16", 0): e4m3(1, 0x3F803F80),
}
# What a float exceeds its level by, or lacks as a factor.
PAIR_OFFSETS = {("int4", "bf16"): 136.0, ("int4", "fp16"): 1032.0}
PAIR_FACTORS = {
    ("e2m1", "bf16"): 2.0**126,
    ("e4m3", "bf16"): 2.0**120,
    ("e4m3", "fp16"): 2.0**8,
}
# Before Hopper there are no products and sums of bfloat16 without the other.
_TIMES = """{
    .reg .b32 z;
    mov.b32 z, 0x80008000;
    fma.rn.bf16x2 $0, $1, $2, z;
}"""
_PLUS = """{
    .reg .b32 one;
    mov.b32 one, 0x3F803F80;
    fma.rn.bf16x2 $0, $1, one, $2;
}"""

_OFFSET: tl.constexpr = tl.constexpr(DECODE_OFFSETS["int4"])
_E2M1_LIFT: tl.constexpr = tl.constexpr(DECODE_FACTORS["e2m1"])
_E4M3_LIFT: tl.constexpr = tl.constexpr(DECODE_FACTORS["e4m3"])
_TIMES_CODE: tl.constexpr = tl.constexpr(_TIMES)
_PLUS_CODE: tl.constexpr = tl.constexpr(_PLUS)
_INT4_BF16_LOW: tl.constexpr = tl.constexpr(PAIR_INSTRUCTIONS["int4", "bf16", 0])
_INT4_BF16_HIGH: tl.constexpr = tl.constexpr(PAIR_INSTRUCTIONS["int4", "bf16", 1])
_INT4_FP16_LOW: tl.constexpr = tl.constexpr(PAIR_INSTRUCTIONS["int4", "fp16", 0])
_INT4_FP16_HIGH: tl.constexpr = tl.constexpr(PAIR_INSTRUCTIONS["int4", "fp16", 1])
_E2M1_LOW: tl.constexpr = tl.constexpr(PAIR_INSTRUCTIONS["e2m1", "bf16", 0])
_E2M1_HIGH: tl.constexpr = tl.constexpr(PAIR_INSTRUCTIONS["e2m1", "bf16", 1])
_E4M3_BF16: tl.constexpr = tl.constexpr(PAIR_INSTRUCTIONS["e4m3", "bf16", 0])
_E4M3_FP16: tl.constexpr = tl.constexpr(PAIR_INSTRUCTIONS["e4m3", "fp16", 0])
_INT4_BF16_OFFSET: tl.constexpr = tl.constexpr(PAIR_OFFSETS["int4", "bf16"])
_INT4_FP16_OFFSET: tl.constexpr = tl.constexpr(PAIR_OFFSETS["int4", "fp16"])
_E2M1_FACTOR: tl.constexpr = tl.constexpr(PAIR_FACTORS["e2m1", "bf16"])
_E4M3_BF16_FACTOR: tl.constexpr = tl.constexpr(PAIR_FACTORS["e4m3", "bf16"])
_E4M3_FP16_FACTOR: tl.constexpr = tl.constexpr(PAIR_FACTORS["e4m3", "fp16"])


@triton.jit
def decode_exactly(held, zeros, HALF: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Return levels less whole zeros in bfloat16 or float16.

    Args:
        held: uint8, with one or two codes each.
        zeros: of ``held``'s shape, any dtype, or None; with e4m3 there are none.
        HALF: which of two codes in a byte.
        KIND: int4 or e4m3.
        DTYPE: of the result.
    """
    if not _COMPILED:
        level = decode_codes(held, None, HALF, KIND)
        level = level - _OFFSET if KIND == "int4" else level * _E4M3_LIFT
        if zeros is not None:
            level -= zeros.to(tl.float32)
        return level.to(DTYPE)
    elif KIND == "e4m3":
        if tl.bfloat16 == DTYPE:
            factor = tl.full(held.shape, _E4M3_BF16_FACTOR, tl.bfloat16)
            return _combined(_bf16_pairs(held, _E4M3_BF16), factor, _TIMES_CODE)
        else:
            return halves(held, _E4M3_FP16) * tl.full([], _E4M3_FP16_FACTOR, tl.float16)
    elif tl.bfloat16 == DTYPE:
        level = _bf16_pairs(held, _INT4_BF16_HIGH if HALF else _INT4_BF16_LOW)
        base = _negated(held, zeros, _INT4_BF16_OFFSET, DTYPE)
        return _combined(level, base, _PLUS_CODE)
    else:
        level = halves(held, _INT4_FP16_HIGH if HALF else _INT4_FP16_LOW)
        return level + _negated(held, zeros, _INT4_FP16_OFFSET, DTYPE)


@triton.jit
def decode_scaled(held, exponents, HALF: tl.constexpr):
    """Return e2m1 levels times scales of one byte (``as_scale``) in bfloat16, exactly."""
    if _COMPILED:
        level = _bf16_pairs(held, _E2M1_HIGH if HALF else _E2M1_LOW)
        scale = (exponents.to(tl.uint16) << 7).to(tl.bfloat16, bitcast=True)
        factor = tl.full(held.shape, _E2M1_FACTOR, tl.bfloat16)
        return _combined(_combined(level, factor, _TIMES_CODE), scale, _TIMES_CODE)
    else:
        level = decode_codes(held, None, HALF, "e2m1") * _E2M1_LIFT
        return (level * as_scale(exponents)).to(tl.bfloat16)


@triton.jit
def _negated(held, zeros, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """Return ``-(zeros + OFFSET)`` of the shape of ``held``."""
    if zeros is None:
        return tl.full(held.shape, -OFFSET, DTYPE)
    else:
        return (-OFFSET - zeros.to(tl.float32)).to(DTYPE)


@triton.jit
def _bf16_pairs(held, CODE: tl.constexpr):
    """Decode [...] uint8 to [...] bfloat16, four at a time."""
    return tl.inline_asm_elementwise(
        CODE,  # pyright: ignore[reportArgumentType]
        "=r,=r,r",
        [held],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _combined(a, b, CODE: tl.constexpr):
    """Apply instructions to two bfloat16 tensors of one shape, two elements at a time."""
    return tl.inline_asm_elementwise(
        CODE,  # pyright: ignore[reportArgumentType]
        "=r,r,r",
        [a, b],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )

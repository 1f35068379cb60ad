"""Decode quantised weights in registers.

Reading codes takes a fraction of the time of dense weights, so the work per code soon limits a
product. A compiler extracts a byte from its word, masks its other half, shifts it to a float's
mantissa and subtracts an offset: five instructions. Here four bytes are processed within a word,
and a byte permutation (``prmt``) extracts one and makes it a float at once. The interpreter does
not support such instructions and computes the same values by arithmetic; ``test_triton_codes.py``,
which parses the instructions, checks that both agree.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.launch import INTERPRETED

_COMPILED: tl.constexpr = tl.constexpr(not INTERPRETED)
# The missing factor of a code's bits when they are moved to float16's exponent and mantissa.
DECODE_FACTORS = {"e2m1": 2.0**14, "e4m3": 2.0**8}
# How much ``decode_codes`` of a code exceeds its level, for callers that subtract it from a sum
# instead.
DECODE_OFFSETS = {"int4": 136.0}

# Four codes c to 128 + c, with c in the third byte.
_INT4_ENDS = """
    and.b32 t, t, 0x0F0F0F0F;
    prmt.b32 $0, t, 0x43000000, 0x7044;
    prmt.b32 $1, t, 0x43000000, 0x7144;
    prmt.b32 $2, t, 0x43000000, 0x7244;
    prmt.b32 $3, t, 0x43000000, 0x7344;
}"""
LOW = "{\n    .reg .b32 t;\n    mov.b32 t, $INPUT;"
HIGH = "{\n    .reg .b32 t;\n    shr.u32 t, $INPUT, 4;"
# Four codes c to 2 ** 23 + 128 + c, with 128 + c in the first byte.
_INT8 = """{
    .reg .b32 t;
    xor.b32 t, $4, 0x80808080;
    prmt.b32 $0, t, 0x4B000000, 0x7440;
    prmt.b32 $1, t, 0x4B000000, 0x7441;
    prmt.b32 $2, t, 0x4B000000, 0x7442;
    prmt.b32 $3, t, 0x4B000000, 0x7443;
}"""
# Two codes to a word, each in the upper byte of its half. The sign is in place, or four bits below;
# in float16 the rest is one bit above its place, or one below.
_E4M3 = """{
    .reg .b32 t, u;
    prmt.b32 t, $2, 0, 0x1404;
    shr.u32 u, t, $SHIFT;
    and.b32 u, u, $MASK;
    and.b32 t, t, 0x80008000;
    or.b32 $0, t, u;
    prmt.b32 t, $2, 0, 0x3424;
    shr.u32 u, t, $SHIFT;
    and.b32 u, u, $MASK;
    and.b32 t, t, 0x80008000;
    or.b32 $1, t, u;
}"""
_E2M1_ENDS = """
    prmt.b32 u, t, 0, 0x1404;
    shl.b32 v, u, 4;
    $MOVE u, u, $BY;
    and.b32 u, u, $MASK;
    and.b32 v, v, 0x80008000;
    or.b32 $0, u, v;
    prmt.b32 u, t, 0, 0x3424;
    shl.b32 v, u, 4;
    $MOVE u, u, $BY;
    and.b32 u, u, $MASK;
    and.b32 v, v, 0x80008000;
    or.b32 $1, u, v;
}"""


def e4m3(right: int, mask: int) -> str:
    """Return instructions that move all but a code's sign to the right."""
    return _E4M3.replace("$SHIFT", str(right)).replace("$MASK", hex(mask))


def e2m1(begin: str, left: int, mask: int) -> str:
    """Return instructions that move all but a code's sign to the left, or to the right if negative.

    ``begin``: of the lower or upper halves.
    """
    move, by = ("shl.b32", left) if left > 0 else ("shr.u32", -left)
    ends = _E2M1_ENDS.replace("$MOVE", move).replace("$BY", str(by)).replace("$MASK", hex(mask))
    return of_half(begin, ends, 2)


def of_half(begin: str, ends: str, num_outputs: int) -> str:
    """Return instructions for the lower or upper halves of four bytes."""
    more = "t, u, v" if num_outputs == 2 else "t"
    return begin.replace("$INPUT", f"${num_outputs}").replace(".b32 t;", f".b32 {more};") + ends


# By kind and half of a byte: from four bytes to four float32, or to float16, two to a word.
INSTRUCTIONS: dict[tuple[str, int], str] = {
    ("int4", 0): of_half(LOW, _INT4_ENDS, 4),
    ("int4", 1): of_half(HIGH, _INT4_ENDS, 4),
    ("int8", 0): _INT8,
    ("e4m3", 0): e4m3(1, 0x3F803F80),
    ("e2m1", 0): e2m1(LOW, 1, 0x0E000E00),
    ("e2m1", 1): e2m1(HIGH, 1, 0x0E000E00),
}
_INT4_LOW: tl.constexpr = tl.constexpr(INSTRUCTIONS["int4", 0])
_INT4_HIGH: tl.constexpr = tl.constexpr(INSTRUCTIONS["int4", 1])
_INT8_ALL: tl.constexpr = tl.constexpr(INSTRUCTIONS["int8", 0])
_E4M3_ALL: tl.constexpr = tl.constexpr(INSTRUCTIONS["e4m3", 0])
_E2M1_LOW: tl.constexpr = tl.constexpr(INSTRUCTIONS["e2m1", 0])
_E2M1_HIGH: tl.constexpr = tl.constexpr(INSTRUCTIONS["e2m1", 1])


@triton.jit
def decode_codes(held, levels, HALF: tl.constexpr, KIND: tl.constexpr):
    """Return codes' levels plus ``DECODE_OFFSETS`` in float32, exactly; those that are floats lack
    the factor in ``DECODE_FACTORS``.

    Args:
        held: uint8, with one or two codes each.
        levels: [16] float32, of a table.
        HALF: which of two codes in a byte.
        KIND: see ``kernels.tiled.TiledWeight``.
    """
    if KIND == "int4":
        if _COMPILED:
            return _floats(held, _INT4_HIGH if HALF else _INT4_LOW)
        else:
            return ((held >> 4 * HALF) & 15).to(tl.float32) + 128.0
    elif KIND == "int8":
        if _COMPILED:
            return _floats(held, _INT8_ALL) - 8388736.0
        else:
            return held.to(tl.int8, bitcast=True).to(tl.float32)
    elif KIND == "e4m3":
        if _COMPILED:
            return halves(held, _E4M3_ALL).to(tl.float32)
        else:
            bits = held.to(tl.uint16)
            bits = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
            return bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "e2m1":
        if _COMPILED:
            return halves(held, _E2M1_HIGH if HALF else _E2M1_LOW).to(tl.float32)
        else:
            bits = (held >> 4 * HALF).to(tl.uint16)
            bits = ((bits & 7) << 9) | ((bits & 8) << 12)
            return bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return tl.load(levels + ((held >> 4 * HALF) & 15))


@triton.jit
def load_scales(places):
    """Load scales in float32."""
    return as_scale(tl.load(places))


@triton.jit
def as_scale(held):
    """Return scales in float32; bytes are exponents."""
    if held.dtype == tl.uint8:
        return (held.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        return held.to(tl.float32)


@triton.jit
def _floats(held, CODE: tl.constexpr):
    """Decode [...] uint8 to [...] float32, four at a time."""
    return tl.inline_asm_elementwise(
        CODE,  # pyright: ignore[reportArgumentType]
        "=r,=r,=r,=r,r",
        [held],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )


@triton.jit
def halves(held, CODE: tl.constexpr):
    """Decode [...] uint8 to [...] float16, four at a time."""
    return tl.inline_asm_elementwise(
        CODE,  # pyright: ignore[reportArgumentType]
        "=r,=r,r",
        [held],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )

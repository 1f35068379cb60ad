"""Tiles of quantised weights as operands of matrix instructions.

    codes, 64 bytes of each output ─► registers ─► levels ─► (level - zero) * scale ─► W x^T

The weight is an operand in registers, so that widened tiles do not pass through shared memory.
Codes and rows of x wait there for their turn, several tiles ahead; scales and zeros are loaded one
tile ahead.

Many rows  The product is turned: the weight's outputs are rows of the instruction, rows of x its
           columns. It is a group of warps' (wgmma), and in flight while they do something else.
Few rows   An instruction of one warp (``mma.m16n8k16``), which nothing has to wait for or fence:
           what takes time here is widening.

A warp's instruction multiplies 16 inputs, of which a thread, one of the four of an output, has two
pairs (PTX ISA, "Matrix Fragments for mma.m16n8k16"; those for wgmma are the same):

    place    0  1 | 2  3 | 4  5 | 6  7 | 8  9 | 10 11 | 12 13 | 14 15
    thread     0      1      2      3      0       1       2       3

Which inputs take these places is free, as long as those of the weight and of x agree. A thread
loads 16 adjacent bytes of codes, for four instructions; what it has loaded is what it multiplies,
and the inputs of x are arranged to match, as they are copied to shared memory: by pairs, or by four
where Triton has two instructions share a thread's inputs, as it does with codes of bytes if the
product is not turned. (Marlin, Frantar et al. 2024, arranges the codes instead; here they keep an
order that other kernels use too.)

A tile is 128 inputs in two parts: the halves of a block of 64 bytes with 4-bit codes, two blocks of
8-bit codes. Each part is a product. Of turned ones only one is in flight at a time: registers that
a product reads must not be written until it is awaited, which no compiler sees to. One product of
both would be cut into steps that stay in flight while the next tile is widened into their
registers; the tests of compiled kernels look for that.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.tiled import BLOCK, TiledWeight
from kernels.triton.code_pairs import decode_exactly, decode_scaled
from kernels.triton.codes import (
    DECODE_FACTORS,
    DECODE_OFFSETS,
    as_scale,
    decode_codes,
    load_scales,
)
from kernels.triton.tiles import dot, dot_add

TILE_INPUTS = 128
_QUAD_BYTES = 4 * BLOCK  # of an output's codes, in the four threads that have it
_MOST_SCALED_ROWS = 32


def kernel_params(weight: TiledWeight) -> dict[str, Any]:
    """Return a weight's compile-time parameters, the last arguments of ``packed_product``."""
    return {
        "INPUTS": weight.inputs,
        "BYTES": weight.codes.shape[1],
        "GROUP": weight.group_size,
        "GROUPS": weight.num_groups,
        "KIND": weight.kind,
        "LIFT": DECODE_FACTORS.get(weight.kind, 1.0),
        "OFFSET": DECODE_OFFSETS.get(weight.kind, 0.0),
        "CODES_A_BYTE": weight.codes_per_byte,
        "BLOCK": _QUAD_BYTES,
    }


def num_input_tiles(weight: TiledWeight) -> int:
    """Return the tiles of a weight's inputs; the last one may be incomplete."""
    return -(-weight.inputs // TILE_INPUTS)


def scales_sums(
    weight: TiledWeight, num_rows: int, dtype: torch.dtype, *, invariant: bool = False
) -> bool:
    """Return whether the sums of a group are scaled instead of its weights, which are exact in 16
    bits then and need no float32.

    Sums of several groups, which consist of whole tiles, only with few rows, which have fewer of
    them. A row of an invariant product has to be computed alike with any number of rows.
    """
    if weight.kind not in ("int4", "e4m3") or dtype.itemsize != 2:
        return False
    if weight.zeros is not None and (weight.zeros.is_floating_point() or weight.kind != "int4"):
        return False
    if weight.num_groups == 1:
        return True
    is_few = num_rows <= _MOST_SCALED_ROWS and not invariant
    return is_few and weight.group_size % TILE_INPUTS == 0


@triton.jit
def packed_product(
    x_rows,  # [ROWS] pointers
    lines,  # [COLUMNS] int64, rows of ``codes``
    codes,
    scales,
    zeros,
    levels,
    order,  # [INPUTS], input of each column of the codes; None: in order
    factor,
    first,
    COUNT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    SCALES_SUMS: tl.constexpr,
    IS_TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    LIFT: tl.constexpr,
    OFFSET: tl.constexpr,
    CODES_A_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply outputs' weights and rows of x over ``COUNT`` tiles from ``first`` on.

    The number is known to the assembler, which otherwise waits for each instruction's sum.

    Returns:
        [COLUMNS, ROWS] float32.
    """
    shape: tl.constexpr = [COLUMNS, ROWS] if IS_TURNED else [ROWS, COLUMNS]  # pyright: ignore[reportAssignmentType]
    acc = tl.zeros(shape, tl.float32)
    following = load_groups(lines, scales, zeros, first, GROUP, GROUPS, CODES_A_BYTE, BLOCK)
    for number in range(COUNT):
        tile = first + number
        groups = following
        following = load_groups(lines, scales, zeros, tile + 1, GROUP, GROUPS, CODES_A_BYTE, BLOCK)
        for part in tl.static_range(2):
            if CODES_A_BYTE == 1 or part == 0:
                held = load_block(
                    *(codes, lines, tile, part, IS_WHOLE, IS_TURNED),
                    *(COLUMNS, BYTES, CODES_A_BYTE, BLOCK),
                )
            widened = widen(
                *(held, levels, groups[part], part, zeros is not None, SCALES_SUMS, IS_TURNED),
                *(x_rows.dtype.element_ty, COLUMNS, GROUPS, KIND, LIFT, OFFSET, BLOCK),
            )
            place = inputs_of_places(tile, part, IS_TURNED, CODES_A_BYTE, BLOCK)
            is_input = place < INPUTS
            if order is not None:
                place = tl.load(order + place, mask=is_input, other=0)
            if IS_WHOLE:
                x = tl.load(x_rows[:, None] + place[None, :])
            else:
                x = tl.load(x_rows[:, None] + place[None, :], mask=is_input[None, :], other=0.0)
            if IS_TURNED:
                a, b = widened, tl.trans(x)
            else:
                a, b = x, tl.trans(widened)
            if not SCALES_SUMS or GROUPS == 1:
                acc = dot_add(a, b, acc)
            elif part == 0:
                sums = dot(a, b)
            else:
                sums = dot_add(a, b, sums)
                scale = as_scale(groups[0][0])
                scale = scale[:, None] if IS_TURNED else scale[None, :]
                acc = tl.fma(sums, tl.broadcast_to(scale, shape), acc)
    common = output_factor(lines, scales, zeros, factor, GROUPS, LIFT if not SCALES_SUMS else 1.0)
    if IS_TURNED:
        return acc * common[:, None]
    else:
        return tl.trans(acc * common[None, :])


@triton.jit
def inputs_of_places(
    tile,
    PART: tl.constexpr,
    IS_TURNED: tl.constexpr,
    CODES_A_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return which input is in each place of a tile's part, [BLOCK] int32.

    Place w (8 s + 4 h + q) + e is element e of thread q's half h for instruction s.
    """
    W: tl.constexpr = 2 if IS_TURNED else 4  # pyright: ignore[reportAssignmentType]
    place = tl.arange(0, BLOCK)
    thread = place // W % 4
    byte = place // (8 * W) * (2 * W) + place // (4 * W) % 2 * W + place % W
    LANE: tl.constexpr = BLOCK // 4
    if CODES_A_BYTE == 2:
        return tile * (2 * BLOCK) + thread * (2 * LANE) + (byte + PART * LANE)
    else:
        return tile * (2 * BLOCK) + PART * BLOCK + thread * LANE + byte


@triton.jit
def load_block(
    codes,
    lines,
    tile,
    PART: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_TURNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BYTES: tl.constexpr,
    CODES_A_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the block of each line's codes for a tile's part, [COLUMNS, BLOCK] bytes by place; 0
    past the end.

    The layout that the compiler gives to the load, of 16 bytes a thread, is then that of the
    instruction's operand, and nothing moves. If the product is turned, a warp has 16 adjacent
    lines there, a thread two of them, 8 apart; but a load goes through the first half of all lines
    first.
    """
    if CODES_A_BYTE == 2:
        block = tile
    else:
        block = 2 * tile + PART
    place = block * BLOCK + tl.arange(0, BLOCK)
    WARPS: tl.constexpr = COLUMNS // 16
    if IS_TURNED:
        by_half = tl.permute(tl.reshape(lines, [WARPS, 2, 8]), (1, 0, 2))
        lines = tl.reshape(by_half, [COLUMNS])
    at = codes + lines[:, None] * BYTES + place[None, :]
    if IS_WHOLE:
        held = tl.load(at)
    else:
        held = tl.load(at, mask=place[None, :] < BYTES, other=0)
    if IS_TURNED:
        by_thread = tl.reshape(held, [2, WARPS, 8, 4, 4, 2, 2])
        return tl.reshape(tl.permute(by_thread, (1, 0, 2, 4, 5, 3, 6)), [COLUMNS, BLOCK])
    else:
        by_thread = tl.reshape(held, [COLUMNS, 4, 2, 2, 4])
        return tl.reshape(tl.permute(by_thread, (0, 2, 3, 1, 4)), [COLUMNS, BLOCK])


@triton.jit
def in_order(values, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """[COLUMNS, BLOCK] by place, of a turned product, to the order of each line's codes."""
    by_place = tl.reshape(values, [COLUMNS, BLOCK // 16, 2, 4, 2])
    return tl.reshape(tl.permute(by_place, (0, 3, 1, 2, 4)), [COLUMNS, BLOCK])


@triton.jit
def load_groups(
    lines,
    scales,
    zeros,
    tile,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CODES_A_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return scales and zeros, as they are stored, of both parts of a tile.

    Each is [lines], or [lines, 4] with one for each thread if a tile has several groups. What does
    not exist is a copy of something else; past the last tile, groups are the last ones.
    """
    first = _load_part(lines, scales, zeros, tile, 0, GROUP, GROUPS, CODES_A_BYTE, BLOCK)
    # Both halves of a thread's bytes are in one group of at least that many.
    if GROUPS == 1 or GROUP % (2 * BLOCK) == 0 or (CODES_A_BYTE == 2 and GROUP % (BLOCK // 2) == 0):
        return first, first
    else:
        return first, _load_part(lines, scales, zeros, tile, 1, GROUP, GROUPS, CODES_A_BYTE, BLOCK)


@triton.jit
def _load_part(
    lines,
    scales,
    zeros,
    tile,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CODES_A_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    LANE: tl.constexpr = BLOCK // 4
    begin = tile * (2 * BLOCK)
    if GROUPS == 1:
        places = lines
    elif GROUP % (2 * BLOCK) == 0:
        places = lines * GROUPS + tl.minimum(begin // GROUP, GROUPS - 1)
    else:
        thread = tl.arange(0, 4)
        if CODES_A_BYTE == 2:
            starts = begin + thread * (2 * LANE) + PART * LANE
        else:
            starts = begin + PART * BLOCK + thread * LANE
        groups = tl.minimum(starts // GROUP, GROUPS - 1)
        places = lines[:, None] * GROUPS + groups[None, :]
    if GROUPS == 1:
        if zeros is None:
            return lines, lines
        else:
            return lines, tl.load(zeros + places)
    else:
        scale = tl.load(scales + places)
        if zeros is None:
            return scale, scale
        else:
            return scale, tl.load(zeros + places)


@triton.jit
def widen(
    held,
    levels,
    group,
    PART: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    SCALES_SUMS: tl.constexpr,
    IS_TURNED: tl.constexpr,
    DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    LIFT: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the weights of a tile's part, [COLUMNS, BLOCK], less ``output_factor``: rounded to
    ``DTYPE``.

    ``SCALES_SUMS``: less the groups' scales, too; exactly.
    """
    scale, zero = group
    if SCALES_SUMS:
        if HAS_ZEROS:
            return decode_exactly(held, _spread(zero, IS_TURNED, COLUMNS, BLOCK), PART, KIND, DTYPE)
        else:
            return decode_exactly(held, None, PART, KIND, DTYPE)
    # A scale that does not exist is no byte.
    if KIND == "e2m1" and not HAS_ZEROS and scale.dtype == tl.uint8 and tl.bfloat16 == DTYPE:
        return decode_scaled(held, _spread(scale, IS_TURNED, COLUMNS, BLOCK), PART)
    level = decode_codes(held, levels, PART, KIND)
    if GROUPS == 1:
        if HAS_ZEROS:
            shift = zero.to(tl.float32) + OFFSET
            level = level * LIFT - shift[:, None]
        elif OFFSET != 0.0:
            level -= OFFSET
    else:
        step = as_scale(scale)
        gain = _spread(step * LIFT, IS_TURNED, COLUMNS, BLOCK)
        if HAS_ZEROS:
            shift = _spread((zero.to(tl.float32) + OFFSET) * step, IS_TURNED, COLUMNS, BLOCK)
            level = tl.fma(level, gain, -shift)
        elif OFFSET != 0.0:
            level = tl.fma(level, gain, gain * -OFFSET)
        else:
            level *= gain
    return level.to(DTYPE)


@triton.jit
def _spread(values, IS_TURNED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """[COLUMNS], or [COLUMNS, 4] by thread, to [COLUMNS, BLOCK] by place."""
    if len(values.shape) == 1:
        return tl.broadcast_to(values[:, None], [COLUMNS, BLOCK])
    else:
        W: tl.constexpr = 2 if IS_TURNED else 4  # pyright: ignore[reportAssignmentType]
        each = tl.broadcast_to(values[:, None, :, None], [COLUMNS, BLOCK // (4 * W), 4, W])
        return tl.reshape(each, [COLUMNS, BLOCK])


@triton.jit
def output_factor(lines, scales, zeros, factor, GROUPS: tl.constexpr, LIFT: tl.constexpr):
    """Return what all of a line's weights have in common, [lines] float32."""
    common = tl.full(lines.shape, 1.0, tl.float32) * factor
    if GROUPS == 1:
        common *= load_scales(scales + lines)
        if zeros is None:
            common *= LIFT
    return common

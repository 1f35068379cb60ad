"""Matrix products with weights in codes of 4 or 8 bits, widened in registers.

A program widens a tile of the weight as it comes from memory and multiplies it as a dense one: the
bytes that are read are those of the codes. Few rows are bound by these bytes, so the inputs of a
product may be split over several programs, by the weight's shape alone; their sums are added in one
order, so a row's result does not change from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.packed import INT4_LEVELS, PackedWeight
from kernels.triton.launch import launch
from kernels.triton.tiles import dot_add

_LARGEST_DEPTH = 128  # inputs of a tile; a divisor of the group, so that a tile has one scale a row
_LEAST_DEPTH = 32  # whose halves, even and odd inputs, are as short as a product can be
# Rows up to which a tile is this high, its columns, its warps.
_TILES = ((16, 16, 64, 4), (64, 64, 64, 4), (2**31, 128, 128, 8))
_FEW_ROWS = 16
_WANTED_PROGRAMS = 264  # two for each multiprocessor of an H100


def refuse(weight: PackedWeight) -> str | None:
    """Why the kernel cannot multiply by a weight, or None when it can."""
    if weight.num_groups > 1 and weight.group % _LEAST_DEPTH:
        return f"groups of {weight.group} inputs"
    return None


def packed_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    levels: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``kernels.reference.quantised.linear_packed``.

    Args:
        x: [n, inputs]; rows are contiguous.
        weight: one that ``refuse`` has nothing against, contiguous.
        levels: those of the weight on its device, [16] float32; None: its codes are their own.
        bias: [outputs] or None.

    Returns:
        [n, outputs] in the dtype of x.
    """
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    num_rows, inputs = x.shape
    outputs = weight.shape[0]
    rows, columns, warps = _tile(num_rows)
    depth = _LARGEST_DEPTH
    while weight.num_groups > 1 and weight.group % depth:
        depth //= 2
    tiles = -(-outputs // columns)
    splits = _num_splits(tiles, inputs, depth) if num_rows <= _FEW_ROWS else 1
    output = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
    sums = output
    if splits > 1:
        sums = torch.empty((splits, num_rows, outputs), dtype=torch.float32, device=x.device)
    is_float = weight.codes.dtype == torch.float8_e4m3fn
    launch(
        _packed_kernel,
        (-(-num_rows // rows) * tiles, splits),
        sums,
        x,
        weight.codes.view(torch.uint8),
        weight.scales,
        weight.zeros,
        levels,
        None if splits > 1 else bias,
        num_rows,
        outputs,
        x.stride(0),
        INPUTS=inputs,
        GROUP=weight.group,
        GROUPS=weight.num_groups,
        KIND="nibbles" if weight.bits == 4 else "floats" if is_float else "integers",
        PER_BYTE=8 // weight.bits,
        HAS_TABLE=weight.levels not in (None, INT4_LEVELS),
        TILES_A_SPLIT=triton.cdiv(triton.cdiv(inputs, depth), splits),
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=depth,
        num_warps=warps,
        num_stages=3,
    )
    if splits == 1:
        return output
    total = sums.sum(0)
    return torch.add(total, bias).to(x.dtype) if bias is not None else total.to(x.dtype)


def _tile(num_rows: int) -> tuple[int, int, int]:
    """Rows, columns and warps."""
    for most, rows, columns, warps in _TILES:
        if num_rows <= most:
            return rows, columns, warps
    raise AssertionError("the last tile is for any number of rows")


def _num_splits(tiles: int, inputs: int, depth: int) -> int:
    """Of the inputs: as many as fill the device, none shorter than four tiles."""
    longest = max(1, inputs // (4 * depth))
    return max(1, min(_WANTED_PROGRAMS // max(tiles, 1), longest, 8))


@triton.jit
def _float8(bits):
    """Bytes of e4m3, none of them not a number, to float32, by arithmetic on bits."""
    size = (bits & 0x7F).to(tl.int32)
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    return tl.where(bits >= 128, -value, value)


@triton.jit
def _widen(codes, levels, KIND: tl.constexpr, HAS_TABLE: tl.constexpr):
    """What codes stand for, in float32."""
    if KIND == "floats":
        return _float8(codes)
    elif KIND == "integers":
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif HAS_TABLE:
        return tl.load(levels + codes)
    else:
        return codes.to(tl.float32) - 8.0


@triton.jit(do_not_specialize=["num_rows"])
def _packed_kernel(
    sums,
    x,
    codes,
    scales,
    zeros,
    levels,
    bias,
    num_rows,
    outputs,
    x_stride,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    PER_BYTE: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    TILES_A_SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile of the output, over one split of the inputs."""
    BYTES: tl.constexpr = (INPUTS + PER_BYTE - 1) // PER_BYTE
    WIDTH: tl.constexpr = DEPTH // PER_BYTE
    row_tiles = tl.cdiv(num_rows, ROWS)
    split = tl.program_id(1)
    rows = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
    # Past the end the last row and column are taken again, which needs no mask.
    x_rows = x + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * x_stride
    outs = tl.minimum(columns, outputs - 1).to(tl.int64)
    place = tl.arange(0, WIDTH)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    first = split * TILES_A_SPLIT
    last = tl.minimum(first + TILES_A_SPLIT, (INPUTS + DEPTH - 1) // DEPTH)
    for tile in range(first, last):
        at = tile * WIDTH + place
        if BYTES % WIDTH == 0:
            held = tl.load(codes + outs[None, :] * BYTES + at[:, None])
        else:
            held = tl.load(
                codes + outs[None, :] * BYTES + at[:, None], mask=at[:, None] < BYTES, other=0
            )
        group = tile * DEPTH // GROUP
        scale = tl.load(scales + outs * GROUPS + group).to(tl.float32)[None, :]
        zero = tl.zeros([1, COLUMNS], tl.float32)
        if zeros is not None:
            zero = tl.load(zeros + outs * GROUPS + group).to(tl.float32)[None, :]
        if KIND == "nibbles":
            # The low halves of a tile's bytes are its even inputs, the high ones the odd.
            for half in tl.static_range(2):
                inputs = tile * DEPTH + 2 * place + half
                a = tl.load(x_rows + inputs[None, :], mask=(inputs < INPUTS)[None, :], other=0.0)
                level = _widen((held >> 4 * half) & 15, levels, KIND, HAS_TABLE)
                acc = dot_add(a, ((level - zero) * scale).to(a.dtype), acc)
        else:
            inputs = tile * DEPTH + place
            a = tl.load(x_rows + inputs[None, :], mask=(inputs < INPUTS)[None, :], other=0.0)
            level = _widen(held, levels, KIND, HAS_TABLE)
            acc = dot_add(a, ((level - zero) * scale).to(a.dtype), acc)
    if bias is not None:
        acc += tl.load(bias + outs).to(tl.float32)[None, :]
    where = sums + (split * num_rows + rows).to(tl.int64)[:, None] * outputs + columns[None, :]
    is_written = (rows < num_rows)[:, None] & (columns < outputs)[None, :]
    tl.store(where, acc.to(sums.dtype.element_ty), mask=is_written)

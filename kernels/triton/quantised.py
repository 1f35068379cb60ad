"""Matrix products with 4-bit or 8-bit weights, dequantised in registers.

A program widens a tile of the weight as it is loaded and multiplies it like a dense one, so only
the codes' bytes are read. Products of few rows are bound by these bytes, so the inputs may be split
over several programs, depending only on the weight's shape. Their sums are added in a fixed order,
so a row's result does not change from run to run. The products of experts (``moe.py``) consist of
the same tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.tiled import BLOCK, TiledWeight
from kernels.triton.codes import DECODE_FACTORS, decode_level, load_scales
from kernels.triton.launch import launch, wait_for_prior_kernels
from kernels.triton.tiles import dot_add

_DEPTH = 128  # inputs of a tile
# Maximum rows for a height, that height, and the tile's columns and warps.
_TILES = ((16, 16, 64, 4), (64, 64, 64, 4), (2**31, 128, 128, 8))
_FEW_ROWS = 16
INVARIANT_ROWS = 64
_TARGET_PROGRAMS = 264  # two per multiprocessor of an H100


def packed_linear(
    x: torch.Tensor,
    weight: TiledWeight,
    bias: torch.Tensor | None = None,
    *,
    invariant: bool = False,
) -> torch.Tensor:
    """See ``kernels.reference.quantised.linear_packed``.

    Args:
        x: [n, inputs]; rows are contiguous.
        weight: of one matrix.
        bias: [outputs] or None.
        invariant: a row has the same bits in any batch, as in ``matmul.py``: inputs are not split,
            and products have at least 64 rows.

    Returns:
        [n, outputs] in the dtype of x.
    """
    if weight.orders is not None:
        x = x.index_select(1, weight.orders[0])
    num_rows, inputs = x.shape
    outputs = weight.outputs
    rows, columns, warps = tile_shape(max(num_rows, INVARIANT_ROWS) if invariant else num_rows)
    tiles = -(-outputs // columns)
    splits = _num_splits(tiles, inputs) if rows == _FEW_ROWS else 1
    output = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
    sums = output
    if splits > 1:
        sums = torch.empty((splits, num_rows, outputs), dtype=torch.float32, device=x.device)
    launch(
        _packed_kernel,
        (-(-num_rows // rows) * tiles, splits),
        sums,
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.levels,
        None if splits > 1 else bias,
        weight.factor,
        num_rows,
        outputs,
        x.stride(0),
        TILES_A_SPLIT=triton.cdiv(triton.cdiv(inputs, _DEPTH), splits),
        ROWS=rows,
        COLUMNS=columns,
        **kernel_params(weight),
        num_warps=warps,
        num_stages=3,
        enable_fp_fusion=not invariant,
    )
    if splits == 1:
        return output
    total = sums.sum(0)
    return torch.add(total, bias).to(x.dtype) if bias is not None else total.to(x.dtype)


def kernel_params(weight: TiledWeight) -> dict[str, Any]:
    """Return a weight's compile-time parameters: the last arguments of ``packed_product``."""
    return {
        "INPUTS": weight.inputs,
        "GROUP": weight.group_size,
        "GROUPS": weight.num_groups,
        "KIND": weight.kind,
        "LIFT": DECODE_FACTORS.get(weight.kind, 1.0),
        "CODES_A_BYTE": weight.codes_per_byte,
        "BLOCK": BLOCK,
        "DEPTH": _DEPTH,
    }


def tile_shape(num_rows: int) -> tuple[int, int, int]:
    """Return rows, columns and warps of a tile of the output."""
    for most, rows, columns, warps in _TILES:
        if num_rows <= most:
            return rows, columns, warps
    raise AssertionError("the last tile is for any number of rows")


def _num_splits(tiles: int, inputs: int) -> int:
    """Return the splits of the inputs: enough to fill the device, none shorter than four tiles."""
    longest = max(1, inputs // (4 * _DEPTH))
    return max(1, min(_TARGET_PROGRAMS // max(tiles, 1), longest, 8))


@triton.jit
def packed_product(
    x_rows,  # [ROWS, 1] pointers
    outs,  # [COLUMNS] int64, rows of ``codes``
    codes,
    scales,
    zeros,
    levels,
    order,  # [INPUTS], input of each column of the codes; None: in order
    factor,
    first,
    last,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    LIFT: tl.constexpr,
    CODES_A_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply rows of x and of the weight over tiles [first, last) of their inputs.

    Returns [ROWS, COLUMNS] float32.
    """
    WIDTH: tl.constexpr = DEPTH // CODES_A_BYTE  # bytes of a tile
    BLOCKS: tl.constexpr = WIDTH // BLOCK
    HELD: tl.constexpr = (INPUTS + BLOCK * CODES_A_BYTE - 1) // (BLOCK * CODES_A_BYTE)
    byte, place = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(first, last):
        block = tile * BLOCKS + tl.arange(0, BLOCKS)
        at = codes + outs[None, None, :] * (HELD * BLOCK)
        at += block[:, None, None] * BLOCK + byte[None, :, None]
        if HELD % BLOCKS == 0:
            held = tl.load(at)
        else:
            held = tl.load(at, mask=block[:, None, None] < HELD, other=0)
        for half in tl.static_range(CODES_A_BYTE):
            begin = (block * CODES_A_BYTE + half) * BLOCK
            level = decode_level(held, levels, half, KIND)
            if zeros is not None or GROUPS > 1:
                # Of the block's half, or of the whole tile if that is in one group.
                if GROUP % DEPTH == 0:
                    group = (tile * DEPTH // GROUP) + tl.zeros([1], tl.int32)
                else:
                    group = tl.minimum(begin // GROUP, GROUPS - 1)
                own = outs[None, :] * GROUPS + group[:, None]
            if zeros is not None:
                if LIFT != 1.0:
                    level *= LIFT
                level -= tl.load(zeros + own).to(tl.float32)[:, None, :]
            if GROUPS > 1:
                scale = load_scales(scales + own)
                if LIFT != 1.0 and zeros is None:
                    scale *= LIFT
                level *= scale[:, None, :]
            inputs = tile * DEPTH + place // BLOCK * (BLOCK * CODES_A_BYTE) + place % BLOCK
            inputs += half * BLOCK
            is_input = inputs < INPUTS
            if order is not None:
                inputs = tl.load(order + inputs, mask=is_input, other=0)
            if INPUTS % DEPTH == 0:
                a = tl.load(x_rows + inputs[None, :])
            else:
                a = tl.load(x_rows + inputs[None, :], mask=is_input[None, :], other=0.0)
            b = tl.reshape(level.to(a.dtype), [WIDTH, COLUMNS])
            acc = dot_add(a, b, acc)
    if GROUPS == 1:
        acc *= tl.load(scales + outs)[None, :]
        if LIFT != 1.0 and zeros is None:
            acc *= LIFT
    return acc * factor


@triton.jit(do_not_specialize=["num_rows"])
def _packed_kernel(
    sums,
    x,
    codes,
    scales,
    zeros,
    levels,
    bias,
    factor,
    num_rows,
    outputs,
    x_stride,
    TILES_A_SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    LIFT: tl.constexpr,
    CODES_A_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile of the output over one split of the inputs."""
    wait_for_prior_kernels()
    row_tiles = tl.cdiv(num_rows, ROWS)
    split = tl.program_id(1)
    rows = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
    # Past the end the last row and column are repeated, which needs no mask.
    x_rows = x + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * x_stride
    outs = tl.minimum(columns, outputs - 1).to(tl.int64)
    first = split * TILES_A_SPLIT
    acc = packed_product(
        x_rows,
        outs,
        codes,
        scales,
        zeros,
        levels,
        None,
        factor,
        first,
        tl.minimum(first + TILES_A_SPLIT, (INPUTS + DEPTH - 1) // DEPTH),
        ROWS,
        COLUMNS,
        INPUTS,
        GROUP,
        GROUPS,
        KIND,
        LIFT,
        CODES_A_BYTE,
        BLOCK,
        DEPTH,
    )
    if bias is not None:
        acc += tl.load(bias + outs).to(tl.float32)[None, :]
    where = sums + (split * num_rows + rows).to(tl.int64)[:, None] * outputs + columns[None, :]
    is_written = (rows < num_rows)[:, None] & (columns < outputs)[None, :]
    tl.store(where, acc.to(sums.dtype.element_ty), mask=is_written)

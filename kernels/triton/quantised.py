"""Matrix products with 4-bit or 8-bit weights.

With few rows, weights are widened in registers during the product, so only the codes' bytes are
read (``packed_tiles.py``). Such products are bound by these bytes, and the inputs may be split over
several programs to have enough of them in flight. Their sums are added in a fixed order, so a
batch's results do not change from run to run.

With many rows each weight would be widened many times. It is widened once instead, to memory, for
the product of a library (``widening.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from kernels.tiled import TiledWeight
from kernels.triton.launch import (
    launch,
    persistent_programs,
    prefetch,
    shared_memory_bytes,
    wait_for_prior_kernels,
)
from kernels.triton.packed_tiles import (
    TILE_INPUTS,
    kernel_params,
    num_input_tiles,
    packed_product,
    scales_sums,
)
from kernels.triton.sums import sum_parts
from kernels.triton.widening import (
    MAX_PACKED_ROWS,
    MAX_PACKED_TILE_ROWS,
    lines_at_once,
    widen_lines,
)


class TileShape(NamedTuple):
    """The tile of a program."""

    rows: int  # of x
    columns: int  # outputs
    num_warps: int
    max_registers: int | None = None  # of a thread; two programs of 8 warps have 128 each


# In warps of 16 outputs, whose codes are widened once for all rows. Two warp groups share the rows
# of x, which are read as often as there are tiles of outputs. With few rows a warp has 32 outputs,
# for which it reads x from shared memory once.
_TILES = (
    TileShape(16, 128, 4),
    TileShape(32, 128, 8, 128),
    TileShape(64, 128, 8, 128),
    TileShape(128, 128, 8),
)
_MOST_UNTURNED_ROWS = 16  # of x in a tile
_FEW_NARROW = TileShape(16, 64, 4)  # turned, or by a table, whose levels are staged as well
_MOST_STAGES = 4
_MOST_STAGES_OF_FEW = 8
_KEPT_SHARED_BYTES = 16 << 10  # of a program, for what is not staged
_KEPT_SHARED_BYTES_OF_FEW = 2 << 10
_TARGET_WARPS = 2112  # 16 per multiprocessor of an H100
_LEAST_TILES = 4  # of a split's inputs
_MOST_SPLITS = 8


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
            and weights are widened in registers for any number of rows.

    Returns:
        [n, outputs] in the dtype of x.
    """
    if weight.orders is not None:
        x = x.index_select(1, weight.orders[0])
    num_rows = x.shape[0]
    if num_rows > MAX_PACKED_ROWS and not invariant:
        return _widened_linear(x, weight, bias)
    outputs = weight.outputs
    # Higher tiles widen a weight once for more rows, but without a second program beside them.
    tile_rows = min(num_rows, MAX_PACKED_TILE_ROWS)
    shape = tile_shape(tile_rows, weight, x.dtype, invariant=invariant)
    tiles, input_tiles = -(-outputs // shape.columns), num_input_tiles(weight)
    row_tiles = -(-num_rows // shape.rows)
    splits = 1 if invariant else _num_splits(row_tiles * tiles * shape.num_warps, input_tiles)
    output = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
    sums = output
    if splits > 1:
        sums = torch.empty((num_rows * splits, outputs), dtype=torch.float32, device=x.device)
    launch(
        _packed_kernel,
        (row_tiles * tiles, splits),
        sums,
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.levels,
        bias,
        weight.factor,
        num_rows,
        outputs,
        x.stride(0),
        SPLITS=splits,
        INPUT_TILES=input_tiles,
        SCALES_SUMS=scales_sums(weight, shape.rows, x.dtype, invariant=invariant),
        IS_TURNED=is_turned(shape, x.dtype, invariant=invariant),
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        **kernel_params(weight),
        num_warps=shape.num_warps,
        num_stages=num_stages(shape, weight, x, tiles * splits),
        # A table of levels needs more for addresses.
        maxnreg=None if weight.kind == "table" else shape.max_registers,
        enable_fp_fusion=not invariant,
    )
    return output if splits == 1 else sum_parts(sums, output)


def tile_shape(
    num_rows: int, weight: TiledWeight, dtype: torch.dtype, *, invariant: bool
) -> TileShape:
    """Return the tile for a number of rows of ``dtype``."""
    shape = next((shape for shape in _TILES if num_rows <= shape.rows), _TILES[-1])
    is_narrow = invariant or dtype.itemsize > 2 or weight.kind == "table"
    return _FEW_NARROW if is_narrow and shape.rows <= _FEW_NARROW.rows else shape


def is_turned(shape: TileShape, dtype: torch.dtype, *, invariant: bool) -> bool:
    """Return whether outputs and rows of x swap roles in the instruction (``packed_tiles.py``)."""
    return invariant or shape.rows > _MOST_UNTURNED_ROWS or dtype.itemsize > 2


def num_stages(
    shape: TileShape, weight: TiledWeight, x: torch.Tensor, programs: int | None = None
) -> int:
    """Return how many tiles of codes, with their rows of ``x``, are in shared memory.

    Two ``programs`` of few rows on each multiprocessor fill it. If there were room for more, the
    next kernel's, which become resident before this one has ended, would go where there is room,
    and some multiprocessors would have twice as many as others.
    """
    of_a_column = TILE_INPUTS // weight.codes_per_byte
    staged = shape.columns * of_a_column + shape.rows * TILE_INPUTS * x.dtype.itemsize
    shared = shared_memory_bytes(x.device)
    is_few = shape != _FEW_NARROW and not is_turned(shape, x.dtype, invariant=False)
    if is_few and programs is not None and programs <= persistent_programs(x.device, 2):
        # The last tile is multiplied from where it is copied to.
        room = shared // 2 - _KEPT_SHARED_BYTES_OF_FEW
        return max(2, min(_MOST_STAGES_OF_FEW, 1 + room // staged))
    resident = 1 if shape.max_registers is None else 2
    return max(2, min(_MOST_STAGES, (shared // resident - _KEPT_SHARED_BYTES) // staged))


def _widened_linear(
    x: torch.Tensor, weight: TiledWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """``packed_linear`` of many rows."""
    outputs = weight.outputs
    count = lines_at_once(weight, x.dtype)
    dense = torch.empty((count, weight.inputs), dtype=x.dtype, device=x.device)
    if outputs == count:
        widen_lines(dense, weight, 0)
        return functional.linear(x, dense, bias)
    output = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
    for first in range(0, outputs, count):
        part = slice(first, min(first + count, outputs))
        own = dense[: part.stop - first]
        widen_lines(own, weight, first)
        output[:, part] = functional.linear(x, own, None if bias is None else bias[part])
    return output


def _num_splits(num_warps: int, input_tiles: int) -> int:
    """Return the splits of the inputs: enough to fill the device, none too short.

    Equal splits need no masks, and are worth up to half as many.
    """
    longest = max(1, input_tiles // _LEAST_TILES)
    most = max(1, min(_TARGET_WARPS // max(num_warps, 1), longest, _MOST_SPLITS))
    equal = max(count for count in range(1, most + 1) if input_tiles % count == 0)
    return equal if 2 * equal > most else most


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
    SPLITS: tl.constexpr,
    INPUT_TILES: tl.constexpr,
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
    """One tile of the output over one split of the inputs."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    split = tl.program_id(1)
    columns = tl.program_id(0) // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
    # Past the end the last column and row are repeated, which needs no mask.
    lines = tl.minimum(columns, outputs - 1)
    lines = lines.to(tl.int64)
    COUNT: tl.constexpr = (INPUT_TILES + SPLITS - 1) // SPLITS
    # The first two cache lines of each output, which no kernel writes: the tiles that are staged.
    begin = split * (COUNT * 2 * BLOCK // CODES_A_BYTE)
    ahead = tl.minimum(begin + tl.arange(0, 2) * 128, BYTES - 1)
    prefetch(codes + lines[:, None] * BYTES + ahead[None, :])
    wait_for_prior_kernels()
    rows = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    x_rows = x + tl.minimum(rows, num_rows - 1).to(tl.int64) * x_stride
    acc = packed_product(
        x_rows,
        lines,
        codes,
        scales,
        zeros,
        levels,
        None,
        factor,
        split * COUNT,
        COUNT,
        COUNT * SPLITS * 2 * BLOCK == INPUTS,
        SCALES_SUMS,
        IS_TURNED,
        ROWS,
        COLUMNS,
        INPUTS,
        BYTES,
        GROUP,
        GROUPS,
        KIND,
        LIFT,
        OFFSET,
        CODES_A_BYTE,
        BLOCK,
    )
    if bias is not None:
        added = tl.load(bias + lines).to(tl.float32)
        if SPLITS > 1:
            added = tl.where(split == 0, added, 0.0)
        acc += added[:, None]
    places = (rows.to(tl.int64) * SPLITS + split) * outputs
    where = sums + places[None, :] + columns[:, None]
    is_written = (rows < num_rows)[None, :] & (columns < outputs)[:, None]
    tl.store(where, acc.to(sums.dtype.element_ty), mask=is_written)

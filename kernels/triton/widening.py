"""Quantised weights widened once, to memory, for products of many rows.

    codes, scales ─► level * scale in the dtype of x, a bounded part of them ─► dense product

A product that widens in registers (``packed_tiles.py``) does so again for each tile of rows. Here
it is done once, and the product waits. Picoseconds a weight of 4096 x 28672, in int4, on an H200:

    rows                                                    64     128     256   1,024
    in registers, in tiles of 64 rows                     0.61    1.15     2.3     9.2
    in tiles of 128                                               1.48    2.84    11.7
    to memory, 2.6 bytes                                  0.83    0.83    0.83    0.83
    + a library's product                                 0.53    0.60    0.88    2.9
    + experts' products: 400 TFLOP/s, but no less than
      2 bytes at 4.27 TB/s take                           0.47    0.64    1.28    5.1

Measured, but for the last line, the right column, and 256 rows in tiles of 64, which follow from
measured rates. So more than 128 rows are multiplied by weights in memory. (Codes of 8 bits take
0.98 in registers for 128 rows, and 1.07 to memory.)

Experts' rows come in whole tiles, which are 128 high if an expert has more than 64 on average: the
host knows that, and a tile that is not full takes as long. So this height is what decides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.tiled import MAX_WIDENED_BYTES, TiledWeight
from kernels.triton.launch import launch, wait_for_prior_kernels
from kernels.triton.packed_tiles import (
    in_order,
    kernel_params,
    load_block,
    load_groups,
    num_input_tiles,
    output_factor,
    widen,
)

# More rows, or higher tiles of experts' rows, are multiplied by weights in memory.
MAX_PACKED_ROWS = 128
MAX_PACKED_TILE_ROWS = 64
_LINES, _TILES = 32, 4  # per program


def lines_at_once(weight: TiledWeight, dtype: torch.dtype) -> int:
    """Return how many outputs of a matrix are widened for a product."""
    return min(weight.outputs, max(1, MAX_WIDENED_BYTES // (weight.inputs * dtype.itemsize)))


def matrices_at_once(weight: TiledWeight, dtype: torch.dtype) -> int:
    """Return how many experts are widened for a product: as many as fit, in equal parts."""
    a_matrix = weight.outputs * weight.inputs * dtype.itemsize
    most = max(1, MAX_WIDENED_BYTES // a_matrix)
    parts = -(-weight.num_matrices // most)
    return -(-weight.num_matrices // parts)


def widen_lines(
    dense: torch.Tensor, weight: TiledWeight, first: int, starts: torch.Tensor | None = None
) -> None:
    """Write outputs from ``first`` on, counted over all matrices, with inputs in the order of the
    codes.

    Args:
        dense: [outputs, inputs] contiguous, in the dtype wanted.
        weight: one matrix or several.
        first: the first output.
        starts: of a ``Routing``: matrices without rows are left out; None: all have some.
    """
    count, input_tiles = dense.shape[0], num_input_tiles(weight)
    launch(
        _widen_kernel,
        (-(-count // _LINES), -(-input_tiles // _TILES)),
        dense,
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.levels,
        weight.factor,
        starts,
        weight.outputs,
        first,
        count,
        LINES=_LINES,
        COUNT=_TILES,
        INPUT_TILES=input_tiles,
        **kernel_params(weight),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["outputs", "first", "count"])
def _widen_kernel(
    dense,
    codes,
    scales,
    zeros,
    levels,
    factor,
    starts,
    outputs,
    first,
    count,
    LINES: tl.constexpr,
    COUNT: tl.constexpr,
    INPUT_TILES: tl.constexpr,
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
    """Some tiles of inputs of some lines."""
    wait_for_prior_kernels()
    if starts is not None:
        begin = first + tl.program_id(0) * LINES
        last = tl.minimum(begin + LINES, first + count) - 1
        if tl.load(starts + begin // outputs) == tl.load(starts + last // outputs + 1):
            return
    own = tl.program_id(0) * LINES + tl.arange(0, LINES)
    lines = first + tl.minimum(own, count - 1).to(tl.int64)
    common = output_factor(lines, scales, zeros, factor, GROUPS, LIFT)
    for number in tl.static_range(COUNT):  # pyright: ignore[reportGeneralTypeIssues]
        tile = tl.minimum(tl.program_id(1) * COUNT + number, INPUT_TILES - 1)
        groups = load_groups(lines, scales, zeros, tile, GROUP, GROUPS, CODES_A_BYTE, BLOCK)
        for part in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
            if CODES_A_BYTE == 1 or part == 0:
                held = load_block(
                    codes, lines, tile, part, False, True, LINES, BYTES, CODES_A_BYTE, BLOCK
                )
            value = widen(
                *(held, levels, groups[part], part, zeros is not None, False, True),
                *(tl.float32, LINES, GROUPS, KIND, LIFT, OFFSET, BLOCK),
            )
            value = in_order((value * common[:, None]).to(dense.dtype.element_ty), LINES, BLOCK)
            # A thread's sixteen codes are of adjacent inputs.
            place = tl.arange(0, BLOCK)
            if CODES_A_BYTE == 2:
                place = place // 16 * 32 + part * 16 + place % 16
            else:
                place += part * BLOCK
            place += tile * (2 * BLOCK)
            where = dense + own.to(tl.int64)[:, None] * INPUTS + place[None, :]
            is_written = (own < count)[:, None] & (place < INPUTS)[None, :]
            tl.store(where, value, mask=is_written)

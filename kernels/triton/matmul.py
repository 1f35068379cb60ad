"""Batch-invariant matrix products: a row has the same bits in any batch.

A library chooses its kernel, and with it the order of summation, by the number of rows. Here every
element is one accumulator that takes its inputs in the same order, 16 at a time, by matrix
instructions of the same depth (64 x 256 x 16 down to 64 x 16 x 16 on Hopper): inputs are never
split. The shape of tiles may therefore depend on the number of rows:

- many rows are the instruction's 64 rows, in tiles of 128 rows x 256 outputs, or x 128 if there
  would be too few of these for all multiprocessors;
- with few rows, the outputs are: 64 per program, and the rows, at least 16, are its columns. A
  weight is read by twice as many programs, and no work is spent on rows that do not exist.

That all sum the 16 inputs alike depends on the matrix unit, and no manual guarantees it: it is
tested at start (``check_products.py``), and if it does not hold, all rows take the same tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.launch import (
    dot_width,
    launch,
    prefetch,
    shared_memory_bytes,
    stages_that_fit,
    wait_for_prior_kernels,
)
from kernels.triton.tiles import dot_add

_DEPTH = 64
_FEW_ROWS = 64
_OUTPUTS = 64  # per program, with few rows
_FEW_STAGES = 8  # where they fit; 64 KB of weights and more are in flight then
# With fewer programs than this some multiprocessors are idle: each program has a whole one's
# memory, and keeps twice the bytes in flight.
_FEW_PROGRAMS = 132
_DEEP_STAGES = {16: 8, 32: 8, 64: 6}
_LINE: tl.constexpr = tl.constexpr(64)  # numbers of two bytes in a cache line


class _Tile(NamedTuple):
    """The tile of a program with many rows, as measured on an H200."""

    rows: int
    columns: int  # outputs
    swath: int  # row tiles of adjacent programs that share columns, which stay in the L2 cache
    num_warps: int
    num_stages: int

    def num_tiles(self, num_rows: int, outputs: int) -> int:
        """Return how many there are."""
        return -(-num_rows // self.rows) * -(-outputs // self.columns)


_LOW = _Tile(64, 128, 8, 4, 5)
_HIGH = _Tile(128, 128, 8, 4, 4)
_WIDE = _Tile(128, 256, 16, 8, 3)
WIDE_SHARED_BYTES = 160 << 10


def invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    vary_tiles: bool = True,
) -> torch.Tensor:
    """See ``kernels.reference.matmul.invariant_linear``; rows are contiguous.

    ``vary_tiles``: with few rows, swap the roles of rows and outputs in the instruction; with many,
    make tiles wider.
    """
    output = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _multiply(output.unsqueeze(1), x.unsqueeze(1), weight.unsqueeze(0), bias, vary_tiles=vary_tiles)
    return output


def invariant_heads(
    x: torch.Tensor, weight: torch.Tensor, keep: int = 0, *, vary_tiles: bool = True
) -> torch.Tensor:
    """See ``kernels.reference.matmul.invariant_heads``; heads' values and weights' rows are
    contiguous."""
    inputs, outputs = weight.shape[2], weight.shape[1]
    made = torch.empty((*x.shape[:2], outputs + keep), dtype=x.dtype, device=x.device)
    _multiply(made[..., :outputs], x[..., :inputs], weight, None, vary_tiles=vary_tiles)
    if keep:
        made[..., outputs:] = x[..., inputs:]
    return made


def _multiply(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    vary_tiles: bool,
) -> None:
    """Multiply heads: [n, heads, outputs] of [n, heads, inputs] and [heads, outputs, inputs]."""
    num_rows, heads, inputs = x.shape
    outputs = weight.shape[1]
    places = (x.stride(0), weight.stride(1), output.stride(0))
    apart = (x.stride(1), weight.stride(0), output.stride(1)) if heads > 1 else (0, 0, 0)
    # float32 has no matrix units, and the compiler sums in an order of its own.
    if vary_tiles and num_rows <= _FEW_ROWS and x.dtype.itemsize == 2:
        tiles, width = -(-outputs // _OUTPUTS) if num_rows else 0, dot_width(num_rows)
        is_deep = tiles * heads <= _FEW_PROGRAMS
        depth = 2 * _DEPTH if is_deep else _DEPTH
        stages = _DEEP_STAGES[width] if is_deep else _FEW_STAGES
        stage_bytes = (_OUTPUTS + width) * depth * x.dtype.itemsize
        launch(
            _turned_matmul_kernel,
            (tiles, heads),
            *(output, x, weight, bias, num_rows, outputs, *places, *apart),
            INPUTS=inputs,
            ROWS=width,
            COLUMNS=_OUTPUTS,
            DEPTH=depth,
            AHEAD=_FEW_STAGES * depth,
            num_warps=4,
            num_stages=stages_that_fit(x.device, stages, stage_bytes),
        )
        return
    tile = _LOW if num_rows <= _LOW.rows or x.dtype.itemsize > 2 else _HIGH
    if x.dtype.itemsize > 2 or shared_memory_bytes(x.device) < WIDE_SHARED_BYTES:
        tile = tile._replace(num_stages=2)
    elif vary_tiles and tile is _HIGH:
        fills = _WIDE.num_tiles(num_rows, outputs) * heads >= _FEW_PROGRAMS
        tile = _WIDE if fills else _HIGH
    launch(
        _matmul_kernel,
        (tile.num_tiles(num_rows, outputs), heads),
        *(output, x, weight, bias, num_rows, outputs, *places, *apart),
        INPUTS=inputs,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=_DEPTH,
        SWATH=tile.swath,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _matmul_kernel(
    output,
    x,
    weight,
    bias,
    num_rows,
    outputs,
    x_stride,
    weight_stride,
    output_stride,
    x_head,
    weight_head,
    output_head,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWATH: tl.constexpr,
):
    """One tile of the output."""
    wait_for_prior_kernels()
    head = tl.program_id(1).to(tl.int64)
    x, weight, output = x + head * x_head, weight + head * weight_head, output + head * output_head
    row_tiles = tl.cdiv(num_rows, ROWS)
    swath = tl.program_id(0) // (SWATH * tl.cdiv(outputs, COLUMNS))
    within = tl.program_id(0) - swath * SWATH * tl.cdiv(outputs, COLUMNS)
    height = tl.minimum(row_tiles - swath * SWATH, SWATH)
    rows = (swath * SWATH + within % height) * ROWS + tl.arange(0, ROWS)
    columns = within // height * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    # Past the end the last row and column are repeated, which needs no mask.
    x_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    weight_rows = tl.minimum(columns, outputs - 1).to(tl.int64)
    a_place = x + (x_rows * x_stride)[:, None] + depth[None, :]
    b_place = weight + (weight_rows * weight_stride)[None, :] + depth[:, None]
    acc = _sum(a_place, b_place, depth, ROWS, COLUMNS, INPUTS, DEPTH)
    if bias is not None:
        acc += tl.load(bias + weight_rows).to(tl.float32)[None, :]
    place = output + rows.to(tl.int64)[:, None] * output_stride + columns[None, :]
    is_written = (rows < num_rows)[:, None] & (columns < outputs)[None, :]
    tl.store(place, acc.to(output.dtype.element_ty), mask=is_written)


@triton.jit(do_not_specialize=["num_rows"])
def _turned_matmul_kernel(
    output,
    x,
    weight,
    bias,
    num_rows,
    outputs,
    x_stride,
    weight_stride,
    output_stride,
    x_head,
    weight_head,
    output_head,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Some outputs of all rows, as W x^T: [COLUMNS, ROWS]."""
    head = tl.program_id(1).to(tl.int64)
    x, weight, output = x + head * x_head, weight + head * weight_head, output + head * output_head
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    # Past the end the last row and column are repeated, which needs no mask.
    x_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    weight_rows = tl.minimum(columns, outputs - 1).to(tl.int64)
    # The first weights, which no kernel writes.
    ahead = tl.minimum(tl.arange(0, AHEAD // _LINE) * _LINE, INPUTS - 1)
    prefetch(weight + (weight_rows * weight_stride)[:, None] + ahead[None, :])
    wait_for_prior_kernels()
    a_place = weight + (weight_rows * weight_stride)[:, None] + depth[None, :]
    b_place = x + (x_rows * x_stride)[None, :] + depth[:, None]
    acc = _sum(a_place, b_place, depth, COLUMNS, ROWS, INPUTS, DEPTH)
    if bias is not None:
        acc += tl.load(bias + weight_rows).to(tl.float32)[:, None]
    place = output + rows.to(tl.int64)[None, :] * output_stride + columns[:, None]
    is_written = (rows < num_rows)[None, :] & (columns < outputs)[:, None]
    tl.store(place, acc.to(output.dtype.element_ty), mask=is_written)


@triton.jit
def _sum(
    a_place,  # [HIGH, DEPTH] pointers
    b_place,  # [DEPTH, WIDE] pointers
    depth,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    INPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """[HIGH, WIDE] float32, in the same order of summation for all callers."""
    acc = tl.zeros([HIGH, WIDE], tl.float32)
    for begin in range(0, INPUTS, DEPTH):
        if INPUTS % DEPTH == 0:
            a, b = tl.load(a_place + begin), tl.load(b_place + begin)
        else:
            is_deep = depth < INPUTS - begin
            a = tl.load(a_place + begin, mask=is_deep[None, :], other=0.0)
            b = tl.load(b_place + begin, mask=is_deep[:, None], other=0.0)
        acc = dot_add(a, b, acc)
    return acc

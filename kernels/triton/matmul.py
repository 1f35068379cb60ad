"""Matrix products whose rows have the same bits in any batch.

A library picks its kernel by the number of rows, and with it the order of summation. Here every
element is one accumulator that takes its inputs in the same order, ``_DEPTH`` at a time, by the
same matrix instruction (64 rows x ``_COLUMNS`` x 16 on Hopper): never split over the inputs. A
tile of 128 rows is two warp groups that each do what the only one of a tile of 64 does, so the
height of a tile may follow the number of rows; nothing else does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.launch import await_turn, launch
from kernels.triton.tiles import dot_add

_COLUMNS = 128
_DEPTH = 64
_LOW_TILE, _HIGH_TILE = 64, 128
# Few rows are bound by reading weights: as many bytes on their way as let two programs share a
# multiprocessor.
_STAGES = {_LOW_TILE: 5, _HIGH_TILE: 4}
# Row tiles that neighbouring programs share the columns of, while those are in the L2 cache.
_SWATH = 8


def invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """See ``kernels.reference.matmul.invariant_linear``; rows are contiguous."""
    num_rows, inputs = x.shape
    outputs = weight.shape[0]
    output = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
    rows = _LOW_TILE if num_rows <= _LOW_TILE else _HIGH_TILE
    launch(
        _matmul_kernel,
        (-(-num_rows // rows) * -(-outputs // _COLUMNS),),
        output,
        x,
        weight,
        bias,
        num_rows,
        outputs,
        x.stride(0),
        weight.stride(0),
        INPUTS=inputs,
        ROWS=rows,
        COLUMNS=_COLUMNS,
        DEPTH=_DEPTH,
        SWATH=_SWATH,
        num_warps=rows // 16,
        num_stages=_STAGES[rows] if x.dtype.itemsize == 2 else 2,
    )
    return output


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["x"])
def _matmul_kernel(
    output,
    x,
    weight,
    bias,
    num_rows,
    outputs,
    x_stride,
    weight_stride,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWATH: tl.constexpr,
):
    """One tile of the output."""
    await_turn()
    row_tiles = tl.cdiv(num_rows, ROWS)
    swath = tl.program_id(0) // (SWATH * tl.cdiv(outputs, COLUMNS))
    within = tl.program_id(0) - swath * SWATH * tl.cdiv(outputs, COLUMNS)
    height = tl.minimum(row_tiles - swath * SWATH, SWATH)
    rows = (swath * SWATH + within % height) * ROWS + tl.arange(0, ROWS)
    columns = within // height * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    # Past the end the last row and column are taken again, which needs no mask.
    x_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    weight_rows = tl.minimum(columns, outputs - 1).to(tl.int64)
    a_place = x + (x_rows * x_stride)[:, None] + depth[None, :]
    b_place = weight + (weight_rows * weight_stride)[None, :] + depth[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, INPUTS, DEPTH):
        if INPUTS % DEPTH == 0:
            a, b = tl.load(a_place + begin), tl.load(b_place + begin)
        else:
            is_deep = depth < INPUTS - begin
            a = tl.load(a_place + begin, mask=is_deep[None, :], other=0.0)
            b = tl.load(b_place + begin, mask=is_deep[:, None], other=0.0)
        acc = dot_add(a, b, acc)
    if bias is not None:
        acc += tl.load(bias + weight_rows).to(tl.float32)[None, :]
    place = output + rows.to(tl.int64)[:, None] * outputs + columns[None, :]
    is_written = (rows < num_rows)[:, None] & (columns < outputs)[None, :]
    tl.store(place, acc.to(output.dtype.element_ty), mask=is_written)

"""What surrounds a product of codes: rounding of activations, row by row, and scales of sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.scaled import LARGEST_CODES, MIN_SCALE, ScaledKernels
from kernels.triton.launch import launch, power_of_2, wait_for_prior_kernels
from kernels.triton.tiles import quotient

_TILE = 8192  # inputs that a program has in registers

_SCALED_ROWS, _SCALED_COLUMNS = 4, 1024  # per program

_LEAST: tl.constexpr = tl.constexpr(MIN_SCALE)
# Adding 1.5 * 2^23 leaves a multiple of one.
_INTEGERS: tl.constexpr = tl.constexpr(12582912.0)


def quantise_rows(x: torch.Tensor, codes_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.scaled.quantise_rows``; rows are contiguous."""
    num_rows, inputs = x.shape
    codes = torch.empty((num_rows, inputs), dtype=codes_dtype, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    tile = min(_TILE, power_of_2(inputs))
    launch(
        _round_kernel,
        (num_rows,),
        codes,
        scales,
        x,
        inputs,
        x.stride(0) if num_rows > 1 else inputs,  # that of a single row must not recompile
        LARGEST=LARGEST_CODES[codes_dtype],
        TILE=tile,
        num_warps=8 if tile > 2048 else 4,
    )
    return codes, scales


def rescale(
    sums: torch.Tensor,
    steps: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
) -> None:
    """See ``kernels.scaled.rescale``; all are contiguous."""
    num_rows, outputs = sums.shape
    launch(
        _rescale_kernel,
        (-(-num_rows // _SCALED_ROWS), -(-outputs // _SCALED_COLUMNS)),
        output,
        sums,
        steps,
        scales,
        bias,
        num_rows,
        outputs,
        ROWS=_SCALED_ROWS,
        COLUMNS=_SCALED_COLUMNS,
        num_warps=4,
    )


SCALED_KERNELS = ScaledKernels(quantise_rows, rescale)


@triton.jit
def _round_kernel(
    codes,
    scales,
    x,
    inputs,
    x_stride,
    LARGEST: tl.constexpr,  # code
    TILE: tl.constexpr,
):
    """One row; more than a tile of it is read twice."""
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    codes += row * inputs
    offset = tl.arange(0, TILE)
    # Magnitudes as integers, of which those that are no numbers are the largest: the scale is none
    # then, either, and so is all that is made of the row.
    largest = tl.zeros([TILE], tl.int32)
    for begin in range(0, inputs, TILE):
        place = begin + offset
        value = tl.load(x + place, mask=place < inputs, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale = tl.div_rn(tl.max(largest, axis=0).to(tl.float32, bitcast=True), LARGEST)
    scale = tl.where(scale < _LEAST, _LEAST, scale)
    tl.store(scales + row, scale)
    for begin in range(0, inputs, TILE):
        place = begin + offset
        value = tl.load(x + place, mask=place < inputs, other=0.0).to(tl.float32)
        value = quotient(value, scale)
        # Rounding may exceed the largest code, which would be no number.
        value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
        if codes.dtype.element_ty == tl.int8:
            value = (value + _INTEGERS) - _INTEGERS
        else:
            value = _round_to_code(value)
        tl.store(codes + place, value.to(codes.dtype.element_ty), mask=place < inputs)


@triton.jit(do_not_specialize=["num_rows"])
def _rescale_kernel(
    output,
    sums,
    steps,
    scales,
    bias,
    num_rows,
    outputs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of outputs."""
    wait_for_prior_kernels()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column, is_row = columns < outputs, rows < num_rows
    place = rows.to(tl.int64)[:, None] * outputs + columns[None, :]
    is_made = is_row[:, None] & is_column[None, :]
    value = tl.load(sums + place, mask=is_made, other=0).to(tl.float32)
    value *= tl.load(steps + rows, mask=is_row, other=0.0)[:, None]
    value *= tl.load(scales + columns, mask=is_column, other=0.0)[None, :]
    if bias is not None:
        value += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(output + place, value.to(output.dtype.element_ty), mask=is_made)


@triton.jit
def _round_to_code(value):
    """Round float32 to the nearest value of e4m3, of two the even one: three bits after the
    leading one, and no step below 2^-9. A conversion then has nothing to round; the interpreter's
    rounds differently."""
    power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # Adding 1.5 * 2^23 steps leaves a multiple of one step.
    shift = tl.maximum(power, 0.015625) * 1572864.0
    return (value + shift) - shift

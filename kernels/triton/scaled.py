"""Round activations to float8, row by row: one launch before a product of codes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.scaled import FP8_MAX, MIN_SCALE
from kernels.triton.launch import launch, power_of_2, wait_for_prior_kernels
from kernels.triton.tiles import quotient

_TILE = 8192  # inputs that a program has in registers

_MAX: tl.constexpr = tl.constexpr(FP8_MAX)
_LEAST: tl.constexpr = tl.constexpr(MIN_SCALE)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.scaled.quantise_rows``; rows are contiguous."""
    num_rows, inputs = x.shape
    codes = torch.empty((num_rows, inputs), dtype=torch.float8_e4m3fn, device=x.device)
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
        TILE=tile,
        num_warps=8 if tile > 2048 else 4,
    )
    return codes, scales


@triton.jit
def _round_kernel(codes, scales, x, inputs, x_stride, TILE: tl.constexpr):
    """One row; more than a tile of it is read twice."""
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    codes += row * inputs
    offset = tl.arange(0, TILE)
    largest = tl.zeros([TILE], tl.float32)
    for begin in range(0, inputs, TILE):
        place = begin + offset
        value = tl.load(x + place, mask=place < inputs, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    scale = tl.maximum(tl.div_rn(tl.max(largest, axis=0), _MAX), _LEAST)
    tl.store(scales + row, scale)
    for begin in range(0, inputs, TILE):
        place = begin + offset
        value = tl.load(x + place, mask=place < inputs, other=0.0).to(tl.float32)
        value = quotient(value, scale)
        # Rounding may exceed the largest code, which would be no number.
        value = tl.minimum(tl.maximum(value, -_MAX), _MAX)
        code = _round_to_code(value).to(codes.dtype.element_ty)
        tl.store(codes + place, code, mask=place < inputs)


@triton.jit
def _round_to_code(value):
    """Round float32 to the nearest value of e4m3, of two the even one: three bits after the
    leading one, and no step below 2^-9. A conversion then has nothing to round; the interpreter's
    rounds differently."""
    power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # Adding 1.5 * 2^23 steps leaves a multiple of one step.
    shift = tl.maximum(power, 0.015625) * 1572864.0
    return (value + shift) - shift

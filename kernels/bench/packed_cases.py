"""Cases of products with quantised weights, compared with products of the widened ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from kernels.bench.case import Case
from kernels.packed import PackedWeight
from kernels.reference.quantised import (
    quantise_fp8,
    quantise_int4,
    quantise_int8,
    quantise_mxfp4,
)
from kernels.scaled import scaled_linear
from kernels.tiled import tile
from kernels.triton.quantised import packed_linear
from kernels.triton.scaled import SCALED_KERNELS
from kernels.triton.skinny_packed import skinny_packed_linear

QUANTISERS: dict[str, Callable[[torch.Tensor], PackedWeight]] = {
    "int4": quantise_int4,
    "int4 in groups of 128": partial(quantise_int4, group=128),
    "int8": quantise_int8,
    "fp8": quantise_fp8,
    "mxfp4": quantise_mxfp4,
}


def packed_case(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rows: int,
    inputs: int,
    outputs: int,
    kind: str,
) -> Case:
    """A product with a quantised weight, and with the widened one; each tensor moved once."""
    x = torch.randn(rows, inputs, dtype=dtype, device=device)
    dense = torch.randn(outputs, inputs, dtype=dtype, device=device) * 0.02
    weight = tile(QUANTISERS[kind](dense))
    widened = weight.matrix(0, dtype)
    product = skinny_packed_linear if rows == 1 else packed_linear
    return Case(
        name,
        run=lambda: product(x, weight),
        peers={"torch, widened": lambda: functional.linear(x, widened)},
        bytes_moved=weight.nbytes + (rows * inputs + rows * outputs) * dtype.itemsize,
        flops=2.0 * rows * inputs * outputs,
    )


def scaled_case(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rows: int,
    inputs: int,
    outputs: int,
    kind: str,
) -> Case:
    """A product of codes with the rounding of its input, and one of the same values in ``dtype``;
    half the bytes and half the time on matrix units."""
    x = torch.randn(rows, inputs, dtype=dtype, device=device)
    dense = torch.randn(outputs, inputs, dtype=dtype, device=device) * 0.02
    weight = QUANTISERS[kind](dense)
    codes, steps = SCALED_KERNELS.round_rows(x, weight.codes.dtype)
    rounded, widened = (codes.float() * steps).to(dtype), weight.dequantise(dtype)
    return Case(
        name,
        run=lambda: scaled_linear(x, weight.codes, weight.scales, None, SCALED_KERNELS),
        peers={"torch, widened": lambda: functional.linear(rounded, widened)},
        bytes_moved=weight.num_bytes + (rows * inputs + rows * outputs) * dtype.itemsize,
        flops=1.0 * rows * inputs * outputs,
    )

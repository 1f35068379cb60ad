"""Weight-only quantisation by rounding to the nearest, and products with such weights, in torch.

The truth that the kernels of ``kernels/cpu`` are held to, and what serves where they cannot run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

# What a 4-bit code stands for, in units of its group's scale.
LEVELS = tuple(float(code - 8) for code in range(16))


class Int8Weight(NamedTuple):
    """``weight[n, k] ~ codes[n, k] * scales[n]``."""

    codes: torch.Tensor  # [outputs, inputs] int8, -127 to 127
    scales: torch.Tensor  # [outputs] float32


class Int4Weight(NamedTuple):
    """``weight[n, k] ~ LEVELS[codes[n, k]] * scales[n, k // group]``."""

    codes: torch.Tensor  # [outputs, inputs] uint8, 0 to 15
    scales: torch.Tensor  # [outputs, inputs / group] float16


def quantise_int8(weight: torch.Tensor) -> Int8Weight:
    """[outputs, inputs] of any float dtype, one scale for each output."""
    peak = weight.abs().amax(1).float()
    scales = torch.where(peak > 0, peak / 127, 1.0)
    return Int8Weight((weight / scales[:, None]).round_().to(torch.int8), scales)


def quantise_int4(weight: torch.Tensor, group: int) -> Int4Weight:
    """[outputs, inputs] of any float dtype, one scale for ``group`` inputs; they must divide.

    The value of largest magnitude becomes level -8, so that all sixteen levels are in use; the
    scale takes its sign from that.
    """
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, inputs // group, group)
    least, most = groups.aminmax(dim=2)
    peak = torch.where(-least >= most, least, most)
    scales = (peak / -8).to(torch.float16)
    steps = torch.where(scales == 0, 1.0, scales.float())[:, :, None]
    codes = (groups / steps + 8).round_().clamp_(0, 15).to(torch.uint8)
    return Int4Weight(codes.view(outputs, inputs), scales)


def dequantise_int8(weight: Int8Weight, dtype: torch.dtype) -> torch.Tensor:
    """[outputs, inputs] in ``dtype``."""
    return (weight.codes * weight.scales[:, None]).to(dtype)


def dequantise_int4(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """[outputs, inputs] in ``dtype``."""
    outputs, inputs = weight.codes.shape
    levels = weight.codes.float() - 8
    groups = levels.view(outputs, weight.scales.shape[1], -1) * weight.scales.float()[:, :, None]
    return groups.view(outputs, inputs).to(dtype)


def linear_int8(x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """[n, inputs] -> [n, outputs]; the weight is widened for each call."""
    return functional.linear(x, dequantise_int8(weight, x.dtype), bias)


def linear_int4(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """[n, inputs] -> [n, outputs]; the weight is widened for each call."""
    return functional.linear(x, dequantise_int4(weight, x.dtype), bias)

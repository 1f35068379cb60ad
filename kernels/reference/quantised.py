"""Weight-only quantisation by rounding to the nearest, and products with such weights, in torch.

The truth that the kernels of ``kernels/cpu`` are held to, and what serves where they cannot run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn import functional

_PIECE_ELEMENTS = 2**20


class Int8Weight(NamedTuple):
    """``weight[n, k] ~ codes[n, k] * scales[n]``."""

    codes: torch.Tensor  # [outputs, inputs] int8, -127 to 127
    scales: torch.Tensor  # [outputs] float32


class Int4Weight(NamedTuple):
    """``weight[n, k] ~ INT4_LEVELS[codes[n, k]] * scales[n, k // group]``."""

    codes: torch.Tensor  # [outputs, inputs] uint8, 0 to 15
    scales: torch.Tensor  # [outputs, inputs / group] float16


def quantise_int8(weight: torch.Tensor) -> Int8Weight:
    """[outputs, inputs] of any float dtype, one scale for each output."""
    codes = torch.empty_like(weight, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], device=weight.device)
    for rows in _pieces(weight):
        values = weight[rows].float()
        peak = values.abs().amax(1)
        scales[rows] = torch.where(peak > 0, peak / 127, 1.0)
        codes[rows] = (values / scales[rows, None]).round_().to(torch.int8)
    return Int8Weight(codes, scales)


def quantise_int4(weight: torch.Tensor, group: int) -> Int4Weight:
    """[outputs, inputs] of any float dtype, one scale for ``group`` inputs; they must divide.

    The value of largest magnitude becomes level -8, so that all sixteen levels are in use; the
    scale takes its sign from that.
    """
    outputs, inputs = weight.shape
    codes = torch.empty_like(weight, dtype=torch.uint8)
    scales = torch.empty((outputs, inputs // group), dtype=torch.float16, device=weight.device)
    for rows in _pieces(weight):
        groups = weight[rows].float().view(-1, inputs // group, group)
        least, most = groups.aminmax(dim=2)
        peak = torch.where(-least >= most, least, most)
        scales[rows] = (peak / -8).to(torch.float16)
        steps = torch.where(scales[rows] == 0, 1.0, scales[rows].float())[:, :, None]
        codes[rows] = (groups / steps + 8).round_().clamp_(0, 15).view(-1, inputs).to(torch.uint8)
    return Int4Weight(codes, scales)


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


def _pieces(weight: torch.Tensor) -> Iterator[slice]:
    """Runs of rows whose float32 copies are small: a head has hundreds of megabytes of them."""
    step = max(1, _PIECE_ELEMENTS // weight.shape[1])
    for begin in range(0, weight.shape[0], step):
        yield slice(begin, begin + step)

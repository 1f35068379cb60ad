"""Quantisation of dense weights, and products with codes, in torch.

This is the reference that kernels are tested against, and the fallback where they cannot run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from kernels.packed import INT4_LEVELS, MXFP4_LEVELS, NF4_LEVELS, PackedWeight, pack_nibbles

INT4_GROUP_SIZE = 32  # inputs that share a scale
NF4_GROUP_SIZE = 64
_MX_GROUP_SIZE = 32

_FP8_MAX = 448.0
_PIECE_ELEMENTS = 2**20


def quantise_int8(weight: torch.Tensor) -> PackedWeight:
    """Quantise [outputs, inputs] of any float dtype to integers, with one scale per output.

    The value of largest magnitude becomes 127 or -127.
    """
    outputs, inputs = weight.shape
    codes = torch.empty((outputs, inputs), dtype=torch.int8, device=weight.device)
    scales = torch.empty((outputs, 1), device=weight.device)
    for rows in _row_ranges(weight):
        values = weight[rows].float()
        scales[rows] = _nonzero_scales(values.abs().amax(1, keepdim=True) / 127)
        codes[rows] = (values / scales[rows]).round_().to(torch.int8)
    return PackedWeight(codes, scales, inputs, inputs, has_quantised_activations=True)


def quantise_fp8(weight: torch.Tensor) -> PackedWeight:
    """Quantise [outputs, inputs] of any float dtype to float8_e4m3fn, with one scale per output.

    The value of largest magnitude becomes 448 or -448, the limits of the format.
    """
    outputs, inputs = weight.shape
    codes = torch.empty((outputs, inputs), dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty((outputs, 1), device=weight.device)
    for rows in _row_ranges(weight):
        values = weight[rows].float()
        scales[rows] = _nonzero_scales(values.abs().amax(1, keepdim=True) / _FP8_MAX)
        scaled = (values / scales[rows]).clamp_(-_FP8_MAX, _FP8_MAX)
        codes[rows] = scaled.to(torch.float8_e4m3fn)
    return PackedWeight(codes, scales, inputs, inputs, has_quantised_activations=True)


def quantise_int4(weight: torch.Tensor, group: int = INT4_GROUP_SIZE) -> PackedWeight:
    """Quantise [outputs, inputs] of any float dtype to sixteen levels, with one scale per ``group``
    inputs.

    The value of largest magnitude becomes level -8, so that all sixteen levels are used; the
    scale's sign is chosen accordingly.
    """
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    codes = torch.empty((outputs, -(-inputs // 2)), dtype=torch.uint8, device=weight.device)
    scales = torch.empty((outputs, groups), dtype=torch.float16, device=weight.device)
    for rows in _row_ranges(weight):
        values = _in_groups(weight[rows], group)
        least, most = values.aminmax(dim=2)
        scales[rows] = (torch.where(-least >= most, least, most) / -8).to(torch.float16)
        levels = (
            (values / _nonzero_scales(scales[rows].float())[:, :, None] + 8).round_().clamp_(0, 15)
        )
        codes[rows] = pack_nibbles(levels.flatten(1)[:, :inputs])
    return PackedWeight(codes, scales, inputs, group, INT4_LEVELS)


def quantise_nf4(weight: torch.Tensor, group: int = NF4_GROUP_SIZE) -> PackedWeight:
    """Quantise [outputs, inputs] of any float dtype to NormalFloat's levels (Dettmers et al. 2023).

    There is one scale per ``group`` inputs: their largest magnitude.
    """
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    codes = torch.empty((outputs, -(-inputs // 2)), dtype=torch.uint8, device=weight.device)
    scales = torch.empty((outputs, groups), dtype=torch.float16, device=weight.device)
    levels = torch.tensor(NF4_LEVELS, device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    for rows in _row_ranges(weight):
        values = _in_groups(weight[rows], group)
        scales[rows] = values.abs().amax(2).to(torch.float16)
        nearest = torch.bucketize(
            values / _nonzero_scales(scales[rows].float())[:, :, None], middles
        )
        codes[rows] = pack_nibbles(nearest.flatten(1)[:, :inputs])
    return PackedWeight(codes, scales, inputs, group, NF4_LEVELS)


def quantise_mxfp4(weight: torch.Tensor) -> PackedWeight:
    """Quantise [outputs, inputs] of any float dtype to MXFP4: the nearest E2M1 floats.

    The scale of 32 inputs is the power of two that brings their largest magnitude to between 4 and
    8 (OCP Microscaling Formats 1.0, 6.3).
    """
    outputs, inputs = weight.shape
    groups = -(-inputs // _MX_GROUP_SIZE)
    codes = torch.empty((outputs, -(-inputs // 2)), dtype=torch.uint8, device=weight.device)
    scales = torch.empty((outputs, groups), device=weight.device)
    levels = torch.tensor(MXFP4_LEVELS[:8], device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    for rows in _row_ranges(weight):
        values = _in_groups(weight[rows], _MX_GROUP_SIZE)
        # Exponents are one more than the logarithm.
        _, exponents = torch.frexp(_nonzero_scales(values.abs().amax(2)))
        scales[rows] = torch.ldexp(torch.ones_like(values[:, :, 0]), exponents - 3)
        nearest = torch.bucketize(values.abs() / scales[rows][:, :, None], middles)
        nearest += 8 * (values < 0)
        codes[rows] = pack_nibbles(nearest.flatten(1)[:, :inputs])
    return PackedWeight(codes, scales, inputs, _MX_GROUP_SIZE, MXFP4_LEVELS)


def linear_packed(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[n, inputs] -> [n, outputs] in x's dtype, to which the weight is widened in each call."""
    return functional.linear(x, weight.dequantise(x.dtype), bias)


def _in_groups(values: torch.Tensor, group: int) -> torch.Tensor:
    """[n, inputs] -> [n, groups, group] float32, padded with zeros."""
    padded = functional.pad(values.float(), (0, -values.shape[1] % group))
    return padded.unflatten(1, (-1, group))


def _nonzero_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return the divisors: scales, or 1 where all values are 0."""
    return torch.where(scales == 0, 1.0, scales)


def _row_ranges(weight: torch.Tensor) -> Iterator[slice]:
    """Yield ranges of rows with small float32 copies: a head's would be hundreds of megabytes."""
    step = max(1, _PIECE_ELEMENTS // weight.shape[1])
    for begin in range(0, weight.shape[0], step):
        yield slice(begin, begin + step)

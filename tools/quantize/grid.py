"""The levels that weights are rounded to, and the scales that groups of inputs share.

    weight[n, k] = (code[n, k] - zero[n, k // group]) * scale[n, k // group]

This module does not know about file formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

_FP8 = torch.float8_e4m3fn


class Scales(NamedTuple):
    """The scales of some groups: float32 values that the file's dtype can represent."""

    scale: torch.Tensor  # [n, groups]
    zero: torch.Tensor | None  # [n, groups], whole numbers; None: all 0

    def column(self, group: int) -> Scales:
        """The scales of one group, [n]."""
        return Scales(self.scale[:, group], None if self.zero is None else self.zero[:, group])


@dataclass(frozen=True, slots=True)
class Grid:
    """The levels of a code.

    Attributes:
        bits: 4 or 8.
        is_float: codes are floats (E4M3, Micikevicius et al. 2022) rather than integers.
        symmetric: zero is a level of every group without a zero point.
        group_size: the number of neighbouring inputs that share a scale; 0: all inputs of an
            output.
        scale_dtype: the dtype of the scales in the file.
    """

    bits: int
    is_float: bool = False
    symmetric: bool = True
    group_size: int = 0
    scale_dtype: torch.dtype = torch.float32

    @property
    def lowest(self) -> float:
        """The smallest code."""
        return float(torch.finfo(_FP8).min) if self.is_float else -(2.0 ** (self.bits - 1))

    @property
    def highest(self) -> float:
        """The largest code."""
        return float(torch.finfo(_FP8).max) if self.is_float else 2.0 ** (self.bits - 1) - 1

    def group_size_of(self, inputs: int) -> int:
        """The number of inputs that share a scale, for a weight with ``inputs`` inputs."""
        return self.group_size or inputs

    def fit(self, weight: torch.Tensor, clip_ratios: torch.Tensor | None = None) -> Scales:
        """Scales that map the largest weights of each group to the end of the range.

        Args:
            weight: [n, inputs] float32, ``inputs`` a multiple of the group.
            clip_ratios: [n, groups] or a number, factors for the range of a group.
        """
        groups = weight.unflatten(1, (-1, self.group_size_of(weight.shape[1])))
        factor = 1.0 if clip_ratios is None else clip_ratios
        if self.symmetric:
            reach = groups.abs().amax(-1) * factor
            levels = self.highest if self.is_float else (self.highest - self.lowest) / 2
            return Scales(self._representable_scale(reach / levels), None)
        low = groups.amin(-1).clamp_(max=0.0) * factor
        high = groups.amax(-1).clamp_(min=0.0) * factor
        scale = self._representable_scale((high - low) / (self.highest - self.lowest))
        zero = (self.lowest - low / scale).round_().clamp_(self.lowest, self.highest)
        return Scales(scale, zero)

    def encode(self, weight: torch.Tensor, scales: Scales) -> torch.Tensor:
        """The nearest codes of a [n, size] piece whose ``scales`` broadcast to it, as floats."""
        codes = weight / scales.scale
        if scales.zero is not None:
            codes += scales.zero
        codes.clamp_(self.lowest, self.highest)
        return codes.to(_FP8).float() if self.is_float else codes.round_()

    def fake_quantise(self, weight: torch.Tensor, scales: Scales) -> torch.Tensor:
        """The values of the nearest codes."""
        return decode(self.encode(weight, scales), scales)

    def to_storage_dtype(self, codes: torch.Tensor) -> torch.Tensor:
        """The codes in eight bits each."""
        return codes.to(_FP8 if self.is_float else torch.int8)

    def _representable_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """Scales as the file holds them, never 0, not even for a group of zeros."""
        held = scale.to(self.scale_dtype).float()
        return torch.where(held > 0, held, torch.full_like(held, self._min_scale))

    @property
    def _min_scale(self) -> float:
        return float(torch.finfo(self.scale_dtype).tiny)


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight [outputs, inputs] as codes."""

    codes: torch.Tensor  # [outputs, inputs] int8 or float8
    scales: Scales  # [outputs, groups]
    grid: Grid

    def dequantise(self) -> torch.Tensor:
        """The weight's values, [outputs, inputs] float32."""
        return decode(self.codes.float(), expand_scales(self.scales, self.codes.shape[1]))

    def rows(self, index: torch.Tensor) -> QuantisedWeight:
        """A selection of its outputs."""
        scale, zero = self.scales
        picked = Scales(scale[index], None if zero is None else zero[index])
        # Indexing is not implemented for eight-bit floats.
        codes = self.codes.view(torch.int8)[index].view(self.codes.dtype)
        return QuantisedWeight(codes, picked, self.grid)


def decode(codes: torch.Tensor, scales: Scales) -> torch.Tensor:
    """The values of codes; ``scales`` broadcast to them."""
    return (codes if scales.zero is None else codes - scales.zero) * scales.scale


def expand_scales(scales: Scales, inputs: int) -> Scales:
    """Scales of groups, expanded to every input: [n, groups] -> [n, inputs]."""
    times = inputs // scales.scale.shape[1]

    def repeated(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(times, dim=1)

    return Scales(repeated(scales.scale), None if scales.zero is None else repeated(scales.zero))


def round_to_nearest(
    weight: torch.Tensor, grid: Grid, clip_ratios: torch.Tensor | None = None
) -> QuantisedWeight:
    """Round every weight [outputs, inputs] float32 to the nearest level of its group."""
    scales = grid.fit(weight, clip_ratios)
    codes = grid.encode(weight, expand_scales(scales, weight.shape[1]))
    return QuantisedWeight(grid.to_storage_dtype(codes), scales, grid)

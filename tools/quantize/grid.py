"""What weights are rounded to: levels, and the scales by which groups of inputs share them.

    weight[n, k] = (code[n, k] - zero[n, k // group]) * scale[n, k // group]

Nothing here knows how a file holds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

_FP8 = torch.float8_e4m3fn


class Scales(NamedTuple):
    """Of some groups, in float32: scales are such as the file's dtype can hold."""

    scale: torch.Tensor  # [n, groups]
    zero: torch.Tensor | None  # [n, groups], whole numbers; None: all 0

    def column(self, group: int) -> Scales:
        """Of one group, [n]."""
        return Scales(self.scale[:, group], None if self.zero is None else self.zero[:, group])


@dataclass(frozen=True, slots=True)
class Grid:
    """Levels of a code.

    Attributes:
        bits: 4 or 8.
        is_float: codes are floats (E4M3, Micikevicius et al. 2022) rather than whole numbers.
        symmetric: zero is a level of every group without a zero point.
        group: neighbouring inputs that share a scale; 0: all of an output's.
        scale_dtype: of the scales in the file.
    """

    bits: int
    is_float: bool = False
    symmetric: bool = True
    group: int = 0
    scale_dtype: torch.dtype = torch.float32

    @property
    def lowest(self) -> float:
        """The least code."""
        return float(torch.finfo(_FP8).min) if self.is_float else -(2.0 ** (self.bits - 1))

    @property
    def highest(self) -> float:
        """The greatest code."""
        return float(torch.finfo(_FP8).max) if self.is_float else 2.0 ** (self.bits - 1) - 1

    def group_of(self, inputs: int) -> int:
        """Inputs that share a scale, of a weight with so many."""
        return self.group or inputs

    def fit(self, weight: torch.Tensor, shrink: torch.Tensor | None = None) -> Scales:
        """Scales that the greatest weights of a group just reach.

        Args:
            weight: [n, inputs] float32, ``inputs`` a multiple of the group.
            shrink: [n, groups] or a number, what the range of a group is multiplied by.
        """
        groups = weight.unflatten(1, (-1, self.group_of(weight.shape[1])))
        factor = 1.0 if shrink is None else shrink
        if self.symmetric:
            reach = groups.abs().amax(-1) * factor
            levels = self.highest if self.is_float else (self.highest - self.lowest) / 2
            return Scales(self._stored(reach / levels), None)
        low = groups.amin(-1).clamp_(max=0.0) * factor
        high = groups.amax(-1).clamp_(min=0.0) * factor
        scale = self._stored((high - low) / (self.highest - self.lowest))
        zero = (self.lowest - low / scale).round_().clamp_(self.lowest, self.highest)
        return Scales(scale, zero)

    def code(self, weight: torch.Tensor, scales: Scales) -> torch.Tensor:
        """The nearest codes of a [n, size] piece whose ``scales`` broadcast to it, as floats."""
        codes = weight / scales.scale
        if scales.zero is not None:
            codes += scales.zero
        codes.clamp_(self.lowest, self.highest)
        return codes.to(_FP8).float() if self.is_float else codes.round_()

    def rounded(self, weight: torch.Tensor, scales: Scales) -> torch.Tensor:
        """What the nearest codes stand for."""
        return value(self.code(weight, scales), scales)

    def stored(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes in eight bits each."""
        return codes.to(_FP8 if self.is_float else torch.int8)

    def _stored(self, scale: torch.Tensor) -> torch.Tensor:
        """Scales as the file holds them, never 0: a group of zeros has one too."""
        held = scale.to(self.scale_dtype).float()
        return torch.where(held > 0, held, torch.full_like(held, self._least_scale))

    @property
    def _least_scale(self) -> float:
        return float(torch.finfo(self.scale_dtype).tiny)


@dataclass(frozen=True, slots=True)
class Rounded:
    """A weight [outputs, inputs] in codes."""

    codes: torch.Tensor  # [outputs, inputs] int8 or float8
    scales: Scales  # [outputs, groups]
    grid: Grid

    def dequantise(self) -> torch.Tensor:
        """What it stands for, [outputs, inputs] float32."""
        return value(self.codes.float(), spread(self.scales, self.codes.shape[1]))

    def rows(self, index: torch.Tensor) -> Rounded:
        """Some of its outputs."""
        scale, zero = self.scales
        picked = Scales(scale[index], None if zero is None else zero[index])
        # Indexing is not made for eight-bit floats.
        codes = self.codes.view(torch.int8)[index].view(self.codes.dtype)
        return Rounded(codes, picked, self.grid)


def value(codes: torch.Tensor, scales: Scales) -> torch.Tensor:
    """What codes stand for; ``scales`` broadcast to them."""
    return (codes if scales.zero is None else codes - scales.zero) * scales.scale


def spread(scales: Scales, inputs: int) -> Scales:
    """Scales of groups, for every input: [n, groups] -> [n, inputs]."""
    times = inputs // scales.scale.shape[1]

    def repeated(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(times, dim=1)

    return Scales(repeated(scales.scale), None if scales.zero is None else repeated(scales.zero))


def round_to_nearest(
    weight: torch.Tensor, grid: Grid, shrink: torch.Tensor | None = None
) -> Rounded:
    """Every weight by itself, to the nearest level of its group: [outputs, inputs] float32."""
    scales = grid.fit(weight, shrink)
    codes = grid.code(weight, spread(scales, weight.shape[1]))
    return Rounded(grid.stored(codes), scales, grid)

"""AWQ (Lin, Tang, Tang, Yang, Chen, Wang, Gan, Dang, Han 2023, arXiv:2306.00978).

Inputs with large magnitudes matter most. Their weights are multiplied by a scale ``s`` before
rounding, and the operation that produces the inputs is divided by it: the layer's output stays the
same, with less error where it counts. The scale is ``mean(|x|) ^ a``, with ``a`` found by search.
Then the range of each group is clipped if finer levels gain more than the clipped weights lose.

The paper runs the layer for each candidate. Here the error of a candidate is computed exactly from
the second moments of the inputs, which are collected anyway (``inputs``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tools.quantize.grid import Grid, round_to_nearest
from tools.quantize.inputs import InputStats, squared_output

_STEPS = 20  # candidates for the exponent, in [0, 1)
_CLIP_RATIOS = tuple(1.0 - 0.05 * step for step in range(11))


class CalibratedWeight(NamedTuple):
    """A weight to be rounded, and the statistics of its inputs."""

    weight: torch.Tensor  # [outputs, inputs] float32
    stats: InputStats


Tie = Callable[[torch.Tensor], torch.Tensor]


def search_scale(
    weights: Sequence[CalibratedWeight], grid: Grid, average_tied: Tie | None = None
) -> torch.Tensor:
    """The factors for the columns of all ``weights`` before rounding, [inputs].

    Args:
        weights: layers with the same inputs, or with parts of one batch (experts).
        grid: the levels they are rounded to.
        average_tied: makes the magnitudes equal for inputs that must have equal scales.

    Returns:
        Ones if no candidate improves on no scaling.
    """
    seen = sum(reader.stats.count for reader in weights)
    magnitude = torch.zeros_like(weights[0].weight[0])
    for reader in weights:
        magnitude += reader.stats.magnitude * (reader.stats.count / max(seen, 1))
    if average_tied is not None:
        magnitude = average_tied(magnitude)
    hessians = [reader.stats.hessian * reader.stats.count for reader in weights]
    best, least = torch.ones_like(magnitude), float("inf")
    for step in range(_STEPS):
        scale = _scale(magnitude, step / _STEPS)
        error = sum(
            _error_scaled(reader.weight, scale, grid, hessian)
            for reader, hessian in zip(weights, hessians, strict=True)
        )
        if error < least:
            best, least = scale, error
    return best


def search_clip_ratios(weight: torch.Tensor, hessian: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The factors for the range of each group, [outputs, groups].

    The error of a group is computed from the second moments of its own inputs, as if the groups
    were independent.
    """
    size = grid.group_size_of(weight.shape[1])
    count = weight.shape[1] // size
    blocks = torch.stack(
        [hessian[at : at + size, at : at + size] for at in range(0, weight.shape[1], size)]
    )
    best = torch.ones(weight.shape[0], count, device=weight.device)
    least = torch.full_like(best, float("inf"))
    for factor in _CLIP_RATIOS:
        rounded = round_to_nearest(weight, grid, torch.full_like(best, factor))
        change = (weight - rounded.dequantise()).unflatten(1, (count, size)).transpose(0, 1)
        error = torch.bmm(change, blocks).mul_(change).sum(-1).T  # [outputs, groups]
        better = error < least
        best = torch.where(better, torch.full_like(best, factor), best)
        least = torch.minimum(error, least)
    return best


def _scale(magnitude: torch.Tensor, exponent: float) -> torch.Tensor:
    """``magnitude ^ exponent``, normalised so that its extremes are equally far from one."""
    scale = magnitude.clamp(min=1e-4) ** exponent
    return scale / (scale.max() * scale.min()).sqrt()


def _error_scaled(
    weight: torch.Tensor, scale: torch.Tensor, grid: Grid, hessian: torch.Tensor
) -> float:
    rounded = round_to_nearest(weight * scale, grid).dequantise() / scale
    return squared_output(weight - rounded, hessian)

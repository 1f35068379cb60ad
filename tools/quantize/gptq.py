"""GPTQ (Frantar, Ashkboos, Hoefler, Alistarh 2022, arXiv:2210.17323).

Inputs are rounded one after the other, and the error of each is compensated by those that follow,
as in the optimal brain surgeon: with H the second moments of the inputs and U the upper Cholesky
factor of its inverse, rounding input j with an error e changes the later ones by ``-e / U[j, j] *
U[j, j+1:]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tools.quantize.grid import Grid, QuantisedWeight, Scales

_BLOCK = 128
_MAX_DAMPING = 1e3


@dataclass(frozen=True, slots=True)
class GptqOptions:
    """How errors are compensated.

    Attributes:
        damping: what is added to the diagonal of H, as a share of its mean.
        by_activity: round the inputs with the largest second moments first ("act-order"). Groups
            still consist of neighbours, with scales of the original weights, so the file needs no
            table of the order.
    """

    damping: float = 0.01
    by_activity: bool = True


def gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    grid: Grid,
    options: GptqOptions,
    clip_ratios: torch.Tensor | None = None,
) -> QuantisedWeight:
    """Round a weight, compensating the error of each input by the inputs after it.

    Args:
        weight: [outputs, inputs] float32.
        hessian: [inputs, inputs], second moments of the layer's inputs.
        grid: the levels.
        options: how errors are compensated.
        clip_ratios: [outputs, groups], factors for the range of each group.

    Raises:
        ValueError: the second moments are not finite.
    """
    dead = hessian.diagonal() == 0  # inputs that were always zero: their weights do not matter
    left = weight.masked_fill(dead, 0.0)
    fixed = grid.fit(left, clip_ratios)  # dead weights must not widen a group's range either
    order = torch.arange(weight.shape[1], device=weight.device)
    if options.by_activity:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = _inverse_factor(hessian[order.unsqueeze(1), order], options.damping)
    columns = _Columns(grid, order, fixed, clip_ratios, refit_groups=not options.by_activity)
    left = left[:, order]
    codes = torch.empty_like(left)
    for begin in range(0, left.shape[1], _BLOCK):
        block = slice(begin, min(begin + _BLOCK, left.shape[1]))
        errors = _round_block(left, codes, factor, block, columns)
        left[:, block.stop :] -= errors @ factor[block, block.stop :]
    placed = torch.empty_like(codes)
    placed[:, order] = codes
    return QuantisedWeight(grid.to_storage_dtype(placed), columns.scales, grid)


class _Columns:
    """The scales of the next input to be rounded."""

    def __init__(
        self,
        grid: Grid,
        order: torch.Tensor,
        scales: Scales,
        clip_ratios: torch.Tensor | None,
        *,
        refit_groups: bool,
    ) -> None:
        self.grid = grid
        self.scales = scales
        self._order = order.tolist()
        self._group = grid.group_size_of(len(self._order))
        self._clip_ratios = clip_ratios
        self._refit_groups = refit_groups

    def of(self, column: int, left: torch.Tensor) -> Scales:
        """The scales of the column-th input in rounding order, [outputs].

        ``left`` holds the current weights. If groups are rounded one after the other, a group's
        scales fit its weights as changed by the groups before it.
        """
        group, place = divmod(self._order[column], self._group)
        if self._refit_groups and place == 0:
            self._fit(group, left[:, column : column + self._group])
        return self.scales.column(group)

    def _fit(self, group: int, weights: torch.Tensor) -> None:
        shrink = None if self._clip_ratios is None else self._clip_ratios[:, group : group + 1]
        scale, zero = self.grid.fit(weights, shrink)
        self.scales.scale[:, group] = scale[:, 0]
        if zero is not None and self.scales.zero is not None:
            self.scales.zero[:, group] = zero[:, 0]


def _round_block(
    left: torch.Tensor,
    codes: torch.Tensor,
    factor: torch.Tensor,
    block: slice,
    columns: _Columns,
) -> torch.Tensor:
    """Round the inputs of a block; returns the error of each over U[j, j], [outputs, block].

    Within the block, errors are propagated at once; the columns after it are updated by one product
    at its end.
    """
    errors = torch.empty_like(left[:, block])
    inner = factor[block, block]
    for offset in range(errors.shape[1]):
        column = block.start + offset
        scales = columns.of(column, left)
        weights = left[:, column]
        codes[:, column] = columns.grid.encode(weights, scales)
        rounded = columns.grid.fake_quantise(weights, scales)
        errors[:, offset] = (weights - rounded) / inner[offset, offset]
        left[:, column + 1 : block.stop] -= torch.outer(
            errors[:, offset], inner[offset, offset + 1 :]
        )
    return errors


def _inverse_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper Cholesky factor of the damped inverse; damping is raised until one exists.

    ``hessian`` is overwritten.
    """
    diagonal = hessian.diagonal()
    mean = float(diagonal.mean())
    if not torch.isfinite(diagonal).all():
        raise ValueError("the inputs of a layer are not finite: the model itself overflows")
    share, added = damping, 0.0
    while share <= _MAX_DAMPING:
        wanted = share * mean or 1.0
        diagonal.add_(wanted - added)  # in place: these matrices are the largest of a layer
        added = wanted
        factor, failed = torch.linalg.cholesky_ex(hessian)
        if not failed:
            factor = torch.cholesky_inverse(factor)
            factor, failed = torch.linalg.cholesky_ex(factor, upper=True)
            if not failed:
                return factor
        share *= 10
    raise ValueError("no damping makes the second moments of a layer's inputs positive")

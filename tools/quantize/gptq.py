"""GPTQ (Frantar, Ashkboos, Hoefler, Alistarh 2022, arXiv:2210.17323).

Inputs are rounded one after the other, and each one's error is made good for by those that are
still to come, as the optimal brain surgeon has it: with H the second moments of the inputs and U
the upper Cholesky factor of its inverse, rounding input j by an error e changes the later ones by
``-e / U[j, j] * U[j, j+1:]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tools.quantize.grid import Grid, Rounded, Scales

_BLOCK = 128
_MOST_DAMPING = 1e3


@dataclass(frozen=True, slots=True)
class GptqOptions:
    """How errors are made good for.

    Attributes:
        damping: what is added to the diagonal of H, as a share of its mean.
        by_activity: the inputs of the greatest second moments are rounded first ("act-order").
            Groups stay those of neighbours, with scales of the weights as they were, so the file
            needs no table of the order.
    """

    damping: float = 0.01
    by_activity: bool = True


def gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    grid: Grid,
    options: GptqOptions,
    shrink: torch.Tensor | None = None,
) -> Rounded:
    """Round a weight, each input's error made good for by the inputs after it.

    Args:
        weight: [outputs, inputs] float32.
        hessian: [inputs, inputs], second moments of the layer's inputs.
        grid: the levels.
        options: see there.
        shrink: [outputs, groups], what the range of each group is multiplied by.

    Raises:
        ValueError: the second moments are not numbers.
    """
    dead = hessian.diagonal() == 0  # inputs that never came: their weights do not matter
    left = weight.masked_fill(dead, 0.0)
    fixed = grid.fit(left, shrink)  # what does not matter does not widen a group's range either
    order = torch.arange(weight.shape[1], device=weight.device)
    if options.by_activity:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = _inverse_factor(hessian[order.unsqueeze(1), order], options.damping)
    columns = _Columns(grid, order, fixed, shrink, refits=not options.by_activity)
    left = left[:, order]
    codes = torch.empty_like(left)
    for begin in range(0, left.shape[1], _BLOCK):
        block = slice(begin, min(begin + _BLOCK, left.shape[1]))
        errors = _round_block(left, codes, factor, block, columns)
        left[:, block.stop :] -= errors @ factor[block, block.stop :]
    placed = torch.empty_like(codes)
    placed[:, order] = codes
    return Rounded(grid.stored(placed), columns.scales, grid)


class _Columns:
    """The scales of the input that is rounded next."""

    def __init__(
        self,
        grid: Grid,
        order: torch.Tensor,
        scales: Scales,
        shrink: torch.Tensor | None,
        *,
        refits: bool,
    ) -> None:
        self.grid = grid
        self.scales = scales
        self._order = order.tolist()
        self._group = grid.group_of(len(self._order))
        self._shrink = shrink
        self._refits = refits

    def of(self, column: int, left: torch.Tensor) -> Scales:
        """Of the column-th input to be rounded, [outputs]; ``left`` is what the weights are now.

        Where groups are rounded one after the other, a group's scales are those of its weights as
        the groups before it have left them.
        """
        group, place = divmod(self._order[column], self._group)
        if self._refits and place == 0:
            self._fit(group, left[:, column : column + self._group])
        return self.scales.column(group)

    def _fit(self, group: int, weights: torch.Tensor) -> None:
        shrink = None if self._shrink is None else self._shrink[:, group : group + 1]
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
    """Round the inputs of a block; returns each one's error over U[j, j], [outputs, block].

    Within the block errors are passed on at once, to those behind it by one product at its end.
    """
    errors = torch.empty_like(left[:, block])
    inner = factor[block, block]
    for offset in range(errors.shape[1]):
        column = block.start + offset
        scales = columns.of(column, left)
        weights = left[:, column]
        codes[:, column] = columns.grid.code(weights, scales)
        rounded = columns.grid.rounded(weights, scales)
        errors[:, offset] = (weights - rounded) / inner[offset, offset]
        left[:, column + 1 : block.stop] -= torch.outer(
            errors[:, offset], inner[offset, offset + 1 :]
        )
    return errors


def _inverse_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper Cholesky factor of the damped inverse; more damping until there is one.

    ``hessian`` is overwritten.
    """
    diagonal = hessian.diagonal()
    mean = float(diagonal.mean())
    if not torch.isfinite(diagonal).all():
        raise ValueError("the inputs of a layer are not finite: the model itself overflows")
    share, added = damping, 0.0
    while share <= _MOST_DAMPING:
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

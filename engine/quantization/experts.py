"""The experts of a layer as one: tensors, or codes, for a grouped product."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.models.linear import Weight
from kernels.moe import ExpertMatrices
from kernels.packed import PackedParts, PackedWeight
from kernels.tiled import tile_experts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StackedForm:
    """How the weights of all experts of a layer are held.

    Attributes:
        dtype: of the model.
        refuse: why no kernel multiplies by codes here, or None when one does.
        round_to: what dense ones are rounded to; None: they stay.
    """

    dtype: torch.dtype
    refuse: Callable[[], str | None]
    round_to: Callable[[torch.Tensor], PackedWeight] | None = None

    def make(self, weight: Weight, count: int) -> ExpertMatrices:
        """The weights of ``count`` experts, [count * outputs, inputs], one after the other. What
        cannot stay in codes is widened once, and the log says why."""
        if isinstance(weight, torch.Tensor):
            if self.round_to is None:
                return weight.unflatten(0, (count, -1))
            weight = PackedParts((self.round_to(weight),))
        reason = self.refuse()
        if reason is None:
            try:
                return tile_experts(weight, count)
            except ValueError as error:
                reason = str(error)
        logger.warning("experts are held in %s: no kernel multiplies codes, %s", self.dtype, reason)
        return weight.dequantise(self.dtype).unflatten(0, (count, -1))

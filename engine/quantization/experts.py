"""A layer's experts stacked into tensors or codes, for a grouped product."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.models.linear import Weight
from kernels.moe import ExpertMatrices
from kernels.packed import PackedParts, PackedWeight
from kernels.tiled import TiledWeight, tile_experts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StackedExpertsMethod:
    """How the stacked experts of a layer are held.

    Attributes:
        dtype: of the model.
        refuse: returns why no kernel multiplies codes here, or None if one does.
        quant_function: what dense weights are quantised to; None: they stay dense.
    """

    dtype: torch.dtype
    refuse: Callable[[], str | None]
    quant_function: Callable[[torch.Tensor], PackedWeight] | None = None

    def make(self, weight: Weight, count: int) -> ExpertMatrices:
        """Make the weights of ``count`` experts, concatenated in [count * outputs, inputs].

        Codes that no kernel takes are widened once, and the log says why.
        """
        if isinstance(weight, torch.Tensor):
            return self._make_from_dense(weight, count)
        try:
            return self._make_from_codes(weight, count)
        except ValueError as error:
            logger.warning("experts are held in %s, not as codes: %s", self.dtype, error)
            return weight.dequantise(self.dtype).unflatten(0, (count, -1))

    def _make_from_dense(self, weight: torch.Tensor, count: int) -> ExpertMatrices:
        if self.quant_function is not None:
            try:
                return self._make_from_codes(PackedParts((self.quant_function(weight),)), count)
            except ValueError as error:
                logger.warning("experts stay in %s, not rounded: %s", self.dtype, error)
        return weight.unflatten(0, (count, -1))

    def _make_from_codes(self, weight: PackedParts, count: int) -> TiledWeight:
        reason = self.refuse()
        if reason is not None:
            raise ValueError(reason)
        return tile_experts(weight, count)

"""Packed weights in the Triton kernels of a GPU."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from engine.models.linear import Head
from engine.quantization.widened import WidenedPacked
from kernels.packed import PackedWeight
from kernels.triton.quantised import packed_linear, refuse

logger = logging.getLogger(__name__)


class TritonPacked(WidenedPacked):
    """A packed weight that is widened in registers as it is multiplied."""

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight.contiguous(), bias, dtype)
        levels = weight.levels
        self._levels = None
        if levels is not None:
            self._levels = torch.tensor(levels, device=weight.codes.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return packed_linear(x, self._weight, self._levels, self._bias)


@dataclass(frozen=True, slots=True)
class TritonPackedForm:
    """See ``engine.quantization.method.PackedForm``.

    Attributes:
        dtype: of the model.
    """

    dtype: torch.dtype

    def make(self, weight: PackedWeight, bias: torch.Tensor | None) -> Head:
        """See ``PackedForm``."""
        reason = refuse(weight)
        if reason is not None:
            logger.warning("no kernel for %s: the weight is widened for every product", reason)
            return WidenedPacked(weight, bias, self.dtype)
        return TritonPacked(weight, bias, self.dtype)

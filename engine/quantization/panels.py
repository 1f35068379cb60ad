"""Packed weights in the native kernels of a CPU."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from engine.models.linear import Head
from engine.quantization.widened import WidenedPacked
from kernels.cpu.grouped import PanelGrouped, refuse
from kernels.cpu.linear import PanelInt8
from kernels.packed import PackedWeight

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PanelPackedForm:
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
        if weight.rounds_inputs and _is_by_output(weight):
            return PanelInt8.of_codes(weight, bias, self.dtype)
        return PanelGrouped(weight, bias, self.dtype)


def _is_by_output(weight: PackedWeight) -> bool:
    """Whether a code times its output's scale is all that there is to it."""
    is_plain = weight.zeros is None and weight.order is None and weight.num_groups == 1
    return is_plain and weight.codes.dtype == torch.int8

"""Packed weights in the native kernels of a CPU."""

from __future__ import annotations

import torch

from engine.models.linear import Head
from kernels.cpu.grouped import PanelGrouped
from kernels.cpu.linear import PanelInt8, min_code
from kernels.packed import PackedWeight


def panel_layer(weight: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> Head:
    """Make a layer from a weight that ``kernels.cpu.grouped.refuse`` accepts.

    It computes in integers if the format rounds activations too.
    """
    if weight.has_quantised_activations and _is_by_output(weight):
        return PanelInt8.from_codes(weight, bias, dtype)
    return PanelGrouped(weight, bias, dtype)


def _is_by_output(weight: PackedWeight) -> bool:
    """Return whether a weight is only a code times its output's scale, with codes that the
    integer product takes."""
    is_plain = weight.zeros is None and weight.order is None and weight.num_groups == 1
    if not is_plain or weight.codes.dtype != torch.int8:
        return False
    return min_code() == -128 or int(weight.codes.min()) >= min_code()

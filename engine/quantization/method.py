"""The linear method of a model, which treats dense tensors and packed weights differently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.models.linear import (
    DenseLinearMethod,
    Head,
    JoinedLinear,
    Linear,
    PerHeadLinear,
    Weight,
)
from engine.quantization.experts import StackedExpertsMethod
from kernels.moe import ExpertMatrices
from kernels.packed import PackedWeight


class PackedLinearMethod(Protocol):
    """How a packed weight is held and computed."""

    def make(self, weight: PackedWeight, bias: torch.Tensor | None) -> Head:
        """Make a layer from its weight, which it may repack and free."""
        ...


@dataclass(frozen=True, slots=True)
class WeightMethod:
    """See ``engine.models.linear.LinearMethod``."""

    dense: DenseLinearMethod
    packed: PackedLinearMethod
    stacked: StackedExpertsMethod
    unquantized: DenseLinearMethod  # of what is never quantised
    per_head: Callable[[torch.Tensor], PerHeadLinear]

    def make(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod``. Parts that cannot be one weight become several layers."""
        if isinstance(weight, torch.Tensor):
            return self.dense.make(weight, bias)
        layers: list[Linear] = []
        begin = 0
        for part in weight.joined():
            own = None if bias is None else bias[begin : begin + part.shape[0]]
            if isinstance(part, PackedWeight):
                layers.append(self.packed.make(part, own))
            else:
                layers.append(self.dense.make(part, own))
            begin += part.shape[0]
        return layers[0] if len(layers) == 1 else JoinedLinear(layers)

    def make_unquantized(self, weight: torch.Tensor) -> Linear:
        """See ``LinearMethod``."""
        return self.unquantized.make(weight, None)

    def make_head(self, weight: Weight) -> Head:
        """See ``LinearMethod``."""
        if isinstance(weight, torch.Tensor):
            return self.dense.make_head(weight)
        (part,) = weight.joined()  # no checkpoint has a head in parts
        if isinstance(part, PackedWeight):
            return self.packed.make(part, None)
        return self.dense.make_head(part)

    def make_per_head(self, weight: torch.Tensor) -> PerHeadLinear:
        """See ``LinearMethod``."""
        return self.per_head(weight)

    def make_experts(self, weight: Weight, count: int) -> ExpertMatrices:
        """See ``LinearMethod``."""
        return self.stacked.make(weight, count)

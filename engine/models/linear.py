"""A linear layer behind a protocol, so that quantisation and adapters come as other methods."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional


class Linear(Protocol):
    """``x W^T + b``: [n, inputs] -> [n, outputs]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to a batch of rows."""
        ...


class LinearMethod(Protocol):
    """How linear layers are held and computed; chosen once, at load."""

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A layer from a loaded weight [outputs, inputs], which it may repack and let go."""
        ...


class DenseLinear:
    """The weight as it is, in the model's dtype."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return functional.linear(x, self.weight, self.bias)


class DenseMethod:
    """Unquantised weights."""

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod``."""
        return DenseLinear(weight, bias)

"""Packed weights where no kernel reads them: held as they are, widened for each product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.models.linear import Head
from kernels.packed import PackedWeight


class WidenedPacked:
    """A packed weight that is widened to the activations' dtype for each product: slow, and right
    in any dtype on any device.
    """

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self._weight = weight
        self._bias = bias
        self._dtype = dtype

    @property
    def num_bytes(self) -> int:
        """See ``Linear``."""
        return self._weight.num_bytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return functional.linear(x, self._weight.dequantise(x.dtype), self._bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``Head``."""
        return self._weight.select(ids).dequantise(self._dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Head``."""
        return self(x).float()


@dataclass(frozen=True, slots=True)
class WidenedPackedForm:
    """See ``engine.quantization.method.PackedForm``."""

    dtype: torch.dtype

    def make(self, weight: PackedWeight, bias: torch.Tensor | None) -> Head:
        """See ``PackedForm``."""
        return WidenedPacked(weight, bias, self.dtype)

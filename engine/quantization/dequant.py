"""Packed weights held by a kernel or, without one, as they are, and widened for each product."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.models.linear import Head, Product
from kernels.packed import PackedWeight

logger = logging.getLogger(__name__)


class DequantLinear:
    """A packed weight that is widened to the activations' dtype for each product.

    This is slow, and works in any dtype on any device.
    """

    def __init__(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        product: Product = functional.linear,
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._dtype = dtype
        self._product = product

    @property
    def num_bytes(self) -> int:
        """See ``Linear``."""
        return self._weight.num_bytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return self._product(x, self._weight.dequantise(x.dtype), self._bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``Head``."""
        return self._weight.select(ids).dequantise(self._dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Head``."""
        return self(x)


@dataclass(frozen=True, slots=True)
class DequantLinearMethod:
    """See ``engine.quantization.method.PackedLinearMethod``."""

    dtype: torch.dtype

    def make(self, weight: PackedWeight, bias: torch.Tensor | None) -> Head:
        """See ``PackedLinearMethod``."""
        return DequantLinear(weight, bias, self.dtype)


@dataclass(frozen=True, slots=True)
class KernelLinearMethod:
    """See ``engine.quantization.method.PackedLinearMethod``: by a kernel, or widened if it refuses.

    Attributes:
        dtype: of the model.
        refuse: returns why the kernel cannot hold a weight, or None if it can.
        layer: makes a layer from a weight, its bias and the dtype.
        product: multiplies by a widened weight.
    """

    dtype: torch.dtype
    refuse: Callable[[PackedWeight], str | None]
    layer: Callable[[PackedWeight, torch.Tensor | None, torch.dtype], Head]
    product: Product = functional.linear

    def make(self, weight: PackedWeight, bias: torch.Tensor | None) -> Head:
        """See ``PackedLinearMethod``."""
        reason = self.refuse(weight)
        if reason is not None:
            logger.warning("no kernel for %s: the weight is widened for every product", reason)
            return DequantLinear(weight, bias, self.dtype, self.product)
        return self.layer(weight, bias, self.dtype)

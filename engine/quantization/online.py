"""Dense weights that are quantised while they load, and then held like those of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config import Quantization
from engine.models.linear import DenseLinearMethod, Head, Linear
from engine.quantization.method import PackedLinearMethod
from kernels.packed import PackedWeight
from kernels.reference.quantised import (
    quantise_fp8,
    quantise_int4,
    quantise_int8,
    quantise_nf4,
)

QuantFunction = Callable[[torch.Tensor], PackedWeight]

QUANT_FUNCTIONS: dict[Quantization, QuantFunction] = {
    "int8": quantise_int8,
    "int4": quantise_int4,
    "nf4": quantise_nf4,
    "fp8": quantise_fp8,
}


@dataclass(frozen=True, slots=True)
class OnlineQuantMethod:
    """See ``engine.models.linear.DenseLinearMethod``.

    Attributes:
        quantization: what weights are quantised to.
        packed: how they are held.
        head: how the head is held, which decides between tokens and is the embedding table if the
            two are tied; None: like the others.
    """

    quantization: Quantization
    packed: PackedLinearMethod
    head: DenseLinearMethod | None = None

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``DenseLinearMethod``."""
        return self.packed.make(QUANT_FUNCTIONS[self.quantization](weight), bias)

    def make_head(self, weight: torch.Tensor) -> Head:
        """See ``DenseLinearMethod``."""
        if self.head is not None:
            return self.head.make_head(weight)
        return self.packed.make(QUANT_FUNCTIONS[self.quantization](weight), None)

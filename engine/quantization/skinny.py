"""Dense layers of a GPU: steps of few rows in a kernel of our own, more in the library's."""

from __future__ import annotations

import torch

from engine.models.linear import DenseLinear, Head, Linear
from kernels.moe import Gating
from kernels.skinny import MOST_ROWS, GateKind, RowNorm
from kernels.triton.skinny import skinny_linear


class SkinnyLinear(DenseLinear):
    """See ``engine.models.linear.FusedLinear``."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        if x.shape[0] > MOST_ROWS:
            return super().__call__(x)
        return skinny_linear(x, self.weight, self.bias)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Head``."""
        if x.shape[0] > MOST_ROWS:
            return super().logits(x)
        return skinny_linear(x, self.weight, self.bias, dtype=torch.float32)

    def gated(self, x: torch.Tensor, gating: Gating) -> torch.Tensor:
        """See ``GatedLinear``."""
        gate = _built_in(gating)
        if x.shape[0] > MOST_ROWS or gate is None:
            return gating(self(x))
        return skinny_linear(x, self.weight, self.bias, gate=gate)

    def normed(self, x: torch.Tensor, norm: RowNorm, gating: Gating | None = None) -> torch.Tensor:
        """See ``FusedLinear``."""
        gate = None if gating is None else _built_in(gating)
        out = skinny_linear(x, self.weight, self.bias, norm=norm, gate=gate)
        return out if gating is None or gate is not None else gating(out)

    def add_to(self, stream: torch.Tensor, x: torch.Tensor) -> None:
        """See ``FusedLinear``."""
        skinny_linear(x, self.weight, self.bias, stream=stream)


class SkinnyMethod:
    """Unquantised weights, as they are."""

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod``."""
        return SkinnyLinear(weight, bias)

    def make_head(self, weight: torch.Tensor) -> Head:
        """See ``LinearMethod``."""
        return SkinnyLinear(weight, None)


def _built_in(gating: Gating) -> GateKind | None:
    """The gate, where the kernel has it."""
    return gating.kind if gating.kind == "silu" or gating.kind == "gelu_tanh" else None

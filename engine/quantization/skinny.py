"""Linear layers of a GPU with a kernel of our own for steps of few rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypedDict, Unpack

import torch
from torch.nn import functional

from engine.models.linear import DenseLinear, Head, Linear
from kernels.moe import Gating
from kernels.skinny import MOST_ROWS, GateKind, RowNorm, built_in
from kernels.triton.skinny import skinny_linear


class Along(TypedDict, total=False):
    """What a product of few rows fuses; see ``kernels.reference.skinny``."""

    norm: RowNorm | None
    gate: GateKind | None
    stream: torch.Tensor | None
    dtype: torch.dtype | None


class FewRows(ABC):
    """A base of ``engine.models.linear.FusedLinear`` for one kind of weights."""

    @abstractmethod
    def few(self, x: torch.Tensor, **along: Unpack[Along]) -> torch.Tensor:
        """Up to ``MOST_ROWS`` rows, [n, inputs] -> [n, outputs (/ 2 with a gate)]."""
        ...

    @abstractmethod
    def many(self, x: torch.Tensor) -> torch.Tensor:
        """Any number of rows: [n, inputs] -> [n, outputs]."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return self.many(x) if x.shape[0] > MOST_ROWS else self.few(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Head``."""
        if x.shape[0] > MOST_ROWS:
            return self.many(x)
        return self.few(x, dtype=torch.float32)

    def gated(self, x: torch.Tensor, gating: Gating) -> torch.Tensor:
        """See ``GatedLinear``."""
        gate = built_in(gating)
        if x.shape[0] > MOST_ROWS or gate is None:
            return gating(self(x))
        return self.few(x, gate=gate)

    def normed(self, x: torch.Tensor, norm: RowNorm, gating: Gating | None = None) -> torch.Tensor:
        """See ``FusedLinear``."""
        gate = None if gating is None else built_in(gating)
        out = self.few(x, norm=norm, gate=gate)
        return out if gating is None or gate is not None else gating(out)

    def add_to(self, stream: torch.Tensor, x: torch.Tensor) -> None:
        """See ``FusedLinear``."""
        self.few(x, stream=stream)


class SkinnyLinear(FewRows, DenseLinear):
    """A dense weight; many rows are multiplied by the library."""

    def few(self, x: torch.Tensor, **along: Unpack[Along]) -> torch.Tensor:
        """See ``FewRows``."""
        return skinny_linear(x, self.weight, self.bias, **along)

    def many(self, x: torch.Tensor) -> torch.Tensor:
        """See ``FewRows``."""
        return functional.linear(x, self.weight, self.bias)


class SkinnyMethod:
    """Unquantised weights, as they are."""

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod``."""
        return SkinnyLinear(weight, bias)

    def make_head(self, weight: torch.Tensor) -> Head:
        """See ``LinearMethod``."""
        return SkinnyLinear(weight, None)

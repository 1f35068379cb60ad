"""Linear layers of a GPU with a kernel of our own for steps of few rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypedDict, Unpack

import torch
from torch.nn import functional

from engine.models.linear import DenseLinear, Head, Linear
from kernels.moe import GatedActivation
from kernels.skinny import GateKind, RowNorm, fused_gate_kind
from kernels.triton.skinny import skinny_linear


class FusedOps(TypedDict, total=False):
    """What a product of few rows fuses; see ``kernels.reference.skinny``."""

    norm: RowNorm | None
    gate: GateKind | None
    stream: torch.Tensor | None
    dtype: torch.dtype | None


class SmallBatchLinear(ABC):
    """A base of ``engine.models.linear.FusedLinear`` for one kind of weights."""

    @property
    def max_fused_rows(self) -> int:
        """One: matrix units multiply two rows as fast as one."""
        return 1

    @abstractmethod
    def forward_small(self, x: torch.Tensor, **fused_ops: Unpack[FusedOps]) -> torch.Tensor:
        """Few rows, [n, inputs] -> [n, outputs (/ 2 with a gate)]."""
        ...

    @abstractmethod
    def forward_large(self, x: torch.Tensor) -> torch.Tensor:
        """Any number of rows: [n, inputs] -> [n, outputs]."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return self.forward_large(x) if x.shape[0] > self.max_fused_rows else self.forward_small(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Head``."""
        if x.shape[0] > self.max_fused_rows:
            return self.forward_large(x)
        return self.forward_small(x, dtype=torch.float32)

    def forward_gated(self, x: torch.Tensor, gating: GatedActivation) -> torch.Tensor:
        """See ``GatedLinear``."""
        gate = fused_gate_kind(gating)
        if x.shape[0] > self.max_fused_rows or gate is None:
            return gating(self(x))
        return self.forward_small(x, gate=gate)

    def forward_normed(
        self, x: torch.Tensor, norm: RowNorm, gating: GatedActivation | None = None
    ) -> torch.Tensor:
        """See ``FusedLinear``."""
        gate = None if gating is None else fused_gate_kind(gating)
        out = self.forward_small(x, norm=norm, gate=gate)
        return out if gating is None or gate is not None else gating(out)

    def add_to(self, stream: torch.Tensor, x: torch.Tensor) -> None:
        """See ``FusedLinear``."""
        self.forward_small(x, stream=stream)


class SkinnyLinear(SmallBatchLinear, DenseLinear):
    """A dense weight; many rows are multiplied by the library."""

    def forward_small(self, x: torch.Tensor, **fused_ops: Unpack[FusedOps]) -> torch.Tensor:
        """See ``SmallBatchLinear``."""
        return skinny_linear(x, self.weight, self.bias, **fused_ops)

    def forward_large(self, x: torch.Tensor) -> torch.Tensor:
        """See ``SmallBatchLinear``."""
        return functional.linear(x, self.weight, self.bias)


class SkinnyMethod:
    """Unquantised weights, as they are."""

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod``."""
        return SkinnyLinear(weight, bias)

    def make_head(self, weight: torch.Tensor) -> Head:
        """See ``LinearMethod``."""
        return SkinnyLinear(weight, None)

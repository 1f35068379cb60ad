"""What a product of few rows takes along: see ``kernels.reference.skinny``."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from kernels.moe import Gating

MOST_ROWS = 4  # that reading the weight hides the arithmetic of, without matrix units

GateKind = Literal["silu", "gelu_tanh"]


class RowNorm(NamedTuple):
    """An RMS norm of what a product reads."""

    weight: torch.Tensor  # [inputs]
    eps: float


def built_in(gating: Gating) -> GateKind | None:
    """The gate, where the kernels have it."""
    return gating.kind if gating.kind == "silu" or gating.kind == "gelu_tanh" else None

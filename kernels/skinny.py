"""Data types for products of few rows; see ``kernels.reference.skinny``."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from kernels.moe import GatedActivation

MAX_SKINNY_ROWS = 4  # of kernels without matrix units; what is worth while, layers say

GateKind = Literal["silu", "gelu_tanh"]


class RowNorm(NamedTuple):
    """An RMS norm of a product's input."""

    weight: torch.Tensor  # [inputs]
    eps: float


def fused_gate_kind(gating: GatedActivation) -> GateKind | None:
    """Return the gate's name if kernels have it built in."""
    return gating.kind if gating.kind == "silu" or gating.kind == "gelu_tanh" else None

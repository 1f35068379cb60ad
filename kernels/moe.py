"""Mixtures of experts: what is asked of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from kernels.activations import ActivationKind
from kernels.tiled import TiledWeight

ExpertMatrices = torch.Tensor | TiledWeight  # [experts, outputs, inputs]
GatingKind = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]


# What the sum of a token's weights is divided by is never zero (DeepSeek-V3).
LEAST_SUM = 1e-20


class ExpertTensors(NamedTuple):
    """MLPs of one shape, ``down(activate(gate_up(x)))``; the gate, if there is one, comes before
    up."""

    gate_up: ExpertMatrices  # [experts, 2 * inner, hidden], or [inner] without a gate
    down: ExpertMatrices  # [experts, hidden, inner]
    gate_up_bias: torch.Tensor | None = None  # [experts, 2 * inner], or [inner]
    down_bias: torch.Tensor | None = None  # [experts, hidden]

    @property
    def num_experts(self) -> int:
        """How many there are."""
        part = self.gate_up
        return part.num_matrices if isinstance(part, TiledWeight) else part.shape[0]


class RouterWeights(NamedTuple):
    """What tells which experts a token goes to."""

    weight: torch.Tensor  # [experts, hidden]; the product is computed in its dtype
    bias: torch.Tensor | None  # [experts]
    correction: torch.Tensor | None  # [experts] float32, added to the scores for the choice alone


class RoutingRule(NamedTuple):
    """How what a router says of a token becomes its experts (``kernels.reference.moe.route``).

    With several groups, of equally many experts, there are at least ``top_k`` in ``top_groups``.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"  # over all experts
    normalised: bool = True  # a token's weights sum to ``scale``
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1


@dataclass(frozen=True, slots=True)
class Gating:
    """What stands between the products of a gated MLP: a function, and its name for kernels that
    have it built in.

    Attributes:
        apply: [n, 2 * inner] -> [n, inner].
        kind: GELU by the error function or by its tanh form; ``clamped_swiglu`` is GPT-OSS's.
        alpha, limit: of ``clamped_swiglu``.
    """

    apply: Callable[[torch.Tensor], torch.Tensor]
    kind: GatingKind
    alpha: float = 0.0
    limit: float = 0.0

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[n, 2 * inner] -> [n, inner]."""
        return self.apply(gate_up)


@dataclass(frozen=True, slots=True)
class Activating:
    """The same of an MLP without a gate.

    Attributes:
        apply: [n, inner] -> [n, inner].
        kind: of it.
    """

    apply: Callable[[torch.Tensor], torch.Tensor]
    kind: ActivationKind

    def __call__(self, up: torch.Tensor) -> torch.Tensor:
        """[n, inner] -> [n, inner]."""
        return self.apply(up)

"""Data types of mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from kernels.activations import ActivationKind
from kernels.tiled import TiledWeight

ExpertMatrices = torch.Tensor | TiledWeight  # [experts, outputs, inputs]
GatedActivationKind = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu", "clamped_silu"]


Scoring = Literal["softmax", "sigmoid", "late_sigmoid", "sparse_mixer"]
# Added to the divisor of a token's weights, so that it is never zero (DeepSeek-V3).
MIN_WEIGHT_SUM = 1e-20


class ExpertTensors(NamedTuple):
    """MLPs of one shape, ``down(activate(gate_up(x)))``; a gate comes before up."""

    gate_up: ExpertMatrices  # [experts, 2 * inner, hidden], or [inner] without a gate
    down: ExpertMatrices  # [experts, hidden, inner]
    gate_up_bias: torch.Tensor | None = None  # [experts, 2 * inner], or [inner]
    down_bias: torch.Tensor | None = None  # [experts, hidden]

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        part = self.gate_up
        return part.num_matrices if isinstance(part, TiledWeight) else part.shape[0]


class RouterWeights(NamedTuple):
    """The router's parameters."""

    weight: torch.Tensor  # [experts, hidden]; the product is computed in its dtype
    bias: torch.Tensor | None  # [experts]
    correction: torch.Tensor | None  # [experts] float32, added to the scores for the choice only


class RoutingRule(NamedTuple):
    """How router outputs become a token's experts (``kernels.reference.moe.route``).

    Groups have equal numbers of experts, and ``top_groups`` of them have at least ``top_k``. With
    ``sparse_mixer`` there are no groups, and no correction. With ``late_sigmoid`` experts are
    chosen by the outputs themselves, and the sigmoids of those chosen are their weights.
    """

    top_k: int
    scoring: Scoring = "softmax"  # over all experts; sparse_mixer: over near ones
    normalised: bool = True  # a token's weights sum to ``scale``
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    margin: float = 0.0  # of sparse_mixer: experts that are further behind do not count


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """The function between the products of a gated MLP, and its name for kernels that have it built
    in.

    Attributes:
        apply: [n, 2 * inner] -> [n, inner].
        kind: GELU by the error function or by tanh; ``clamped_swiglu`` is GPT-OSS's, and
            ``clamped_silu`` Step-3.7's.
        alpha, limit: of the clamped ones; ``clamped_silu`` has a limit only.
    """

    apply: Callable[[torch.Tensor], torch.Tensor]
    kind: GatedActivationKind
    alpha: float = 0.0
    limit: float = 0.0

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[n, 2 * inner] -> [n, inner]."""
        return self.apply(gate_up)


@dataclass(frozen=True, slots=True)
class Activation:
    """The function between the products of an MLP without a gate.

    Attributes:
        apply: [n, inner] -> [n, inner].
        kind: its name.
    """

    apply: Callable[[torch.Tensor], torch.Tensor]
    kind: ActivationKind

    def __call__(self, up: torch.Tensor) -> torch.Tensor:
        """[n, inner] -> [n, inner]."""
        return self.apply(up)

"""A layer's MLP, and the activation between its products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import NormalDist

import torch

from engine.models.adapters import Adapters, project
from engine.models.expert_weights import MlpWeights
from engine.models.linear import GatedLinear, Linear
from engine.models.spec import ClampedSwiglu, DecoderSpec
from kernels.moe import Activation, GatedActivation
from kernels.operations import Operations

Activate = Callable[[torch.Tensor], torch.Tensor]


class Mlp:
    """[n, inputs] -> [n, outputs].

    Args:
        weights: its two projections.
        activate: the function between them.
    """

    def __init__(self, weights: MlpWeights, activate: Activate) -> None:
        self._weights = weights
        self._activate = activate
        self._project_up = _bind_gate_up(weights.gate_up, activate)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the MLP to a batch of rows."""
        return self._weights.down(self._project_up(x))

    def forward_with_adapters(
        self, x: torch.Tensor, adapters: Adapters, names: tuple[str, str]
    ) -> torch.Tensor:
        """Apply the MLP with adapters on its two weights, which have these ``names``."""
        inner = self._activate(project(self._weights.gate_up, x, adapters, names[0]))
        return project(self._weights.down, inner, adapters, names[1])


def bind_activation(
    spec: DecoderSpec,
    operations: Operations,
    xielu: torch.Tensor | None = None,
    limit: float | None = None,
    sparsity: float = 0.0,
) -> Activate:
    """Return the function from the (gate and) up projection to the input of the down projection.

    ``xielu`` has the layer's coefficients, if that is the model's activation. A ``limit`` clamps
    the layer's SwiGLU. With ``sparsity``, about that share of the gates is zeroed.
    """
    if sparsity:
        dense = bind_activation(spec, operations)
        deviations = NormalDist().inv_cdf(sparsity)
        return lambda gate_up: dense(_sparse_gates(gate_up, deviations))
    if limit is not None:
        return GatedActivation(
            lambda gate_up: operations.clamped_silu_mul(gate_up, limit), "clamped_silu", limit=limit
        )
    kind = spec.activation
    if kind == "xielu":
        assert xielu is not None
        return lambda x: operations.xielu(x, xielu)
    if isinstance(kind, ClampedSwiglu):
        return GatedActivation(
            lambda gate_up: operations.clamped_swiglu(gate_up, kind.alpha, kind.limit),
            "clamped_swiglu",
            kind.alpha,
            kind.limit,
        )
    if not spec.gated or kind in ("relu", "relu2"):
        return Activation(lambda x: operations.activate(x, kind), kind)
    known = {
        "silu": operations.silu_mul,
        "gelu_tanh": operations.gelu_mul,
        "gelu": operations.erf_gelu_mul,
    }
    return GatedActivation(known[kind], kind)


def _sparse_gates(gate_up: torch.Tensor, deviations: float) -> torch.Tensor:
    """Subtract from each gate the mean of its row's and so many standard deviations of them, and
    zero what is negative then (Gemma 3n). That is most of them: gates are about normal.

    [n, 2 * d], gates first -> the same.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    deviation, mean = torch.std_mean(gate, dim=-1, keepdim=True, correction=0)
    cut = mean + deviation * deviations
    return torch.cat((torch.relu(gate - cut), up), dim=-1)


def _bind_gate_up(gate_up: Linear, activate: Activate) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from the MLP's input to the input of the down projection."""
    if isinstance(activate, GatedActivation) and isinstance(gate_up, GatedLinear):
        return partial(gate_up.forward_gated, gating=activate)
    return lambda x: activate(gate_up(x))

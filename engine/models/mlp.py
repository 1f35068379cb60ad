"""A layer's MLP, and what stands between its products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from engine.models.adapters import Adapters
from engine.models.modules import MlpWeights
from engine.models.spec import ClampedSwiglu, DecoderSpec
from kernels.moe import Gating
from kernels.operations import Operations

Activate = Callable[[torch.Tensor], torch.Tensor]


def mlp(weights: MlpWeights, activate: Activate, x: torch.Tensor) -> torch.Tensor:
    """[n, inputs] -> [n, outputs]."""
    return weights.down(activate(weights.gate_up(x)))


def adapted_mlp(
    weights: MlpWeights,
    activate: Activate,
    names: tuple[str, str],
    x: torch.Tensor,
    adapters: Adapters | None,
) -> torch.Tensor:
    """The same, with what adapters add to its two weights of these ``names``."""
    if adapters is None:
        return mlp(weights, activate, x)
    inner = activate(adapters.add(weights.gate_up(x), x, names[0]))
    return adapters.add(weights.down(inner), inner, names[1])


def bind_activation(spec: DecoderSpec, operations: Operations) -> Activate:
    """From the (gate and) up projection to what goes down."""
    kind = spec.activation
    if isinstance(kind, ClampedSwiglu):
        return Gating(
            lambda gate_up: operations.clamped_swiglu(gate_up, kind.alpha, kind.limit),
            "clamped_swiglu",
            kind.alpha,
            kind.limit,
        )
    if spec.gated:
        known = {"silu": operations.silu_mul, "gelu_tanh": operations.gelu_mul, "gelu": _gelu_mul}
        return Gating(known[kind], kind)
    if kind == "silu":
        return functional.silu
    return partial(functional.gelu, approximate="tanh" if kind == "gelu_tanh" else "none")


def _gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate).mul_(up)

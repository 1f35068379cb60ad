"""What a layer does with each token by itself: an MLP, or a mixture of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from engine.models.adapters import Adapters
from engine.models.modules import ExpertWeights, MlpWeights
from engine.models.routing import Router
from engine.models.spec import ClampedSwiglu, DecoderSpec, MoeSpec
from kernels.operations import Operations

Activate = Callable[[torch.Tensor], torch.Tensor]


Feed = Callable[[torch.Tensor, Adapters | None], torch.Tensor]


def bind_mlp(
    spec: DecoderSpec, weights: MlpWeights | ExpertWeights, operations: Operations, index: int
) -> Feed:
    """What layer ``index`` does: [n, hidden_size] -> [n, hidden_size], a tensor of its own."""
    activate = _activation(spec, operations)
    if isinstance(weights, MlpWeights):
        names = f"{index}.gate_up.weight", f"{index}.down.weight"
        return partial(_adapted_mlp, weights, activate, names)
    assert spec.moe is not None
    return Experts(spec.moe, weights, activate, operations, index)


class Experts:
    """A mixture of experts (Shazeer et al. 2017), and beside it the one that all tokens see.

    On a GPU all experts are one grouped product that waits for nothing. On a CPU each expert that
    was chosen is a linear layer of its own, on the tokens that chose it: quantised as any other.
    """

    def __init__(
        self,
        spec: MoeSpec,
        weights: ExpertWeights,
        activate: Activate,
        operations: Operations,
        index: int,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._route = Router(spec, weights.router)
        self._activate = activate
        self._operations = operations
        self._shared_names = f"{index}.shared.gate_up.weight", f"{index}.shared.down.weight"

    def __call__(self, x: torch.Tensor, adapters: Adapters | None) -> torch.Tensor:
        """[n, hidden_size] -> [n, hidden_size]. Of the experts only the one that all tokens see has
        adapters: none is read for others."""
        weights = self._weights
        ids, shares = self._route(x)
        if weights.stacked is not None:
            out = self._operations.fused_moe(
                x, weights.stacked, ids, shares, self._activate, self._spec.weighs_input
            )
        else:
            out = self._each(x, ids, shares)
        if weights.shared is None:
            return out
        shared = _adapted_mlp(weights.shared, self._activate, self._shared_names, x, adapters)
        if weights.shared_gate is not None:
            shared *= torch.sigmoid(functional.linear(x, weights.shared_gate))
        return out.add_(shared)

    def _each(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        top_k, num_experts = self._spec.top_k, self._spec.num_experts
        experts = ids.flatten()
        pairs = experts.argsort(stable=True)  # token * top_k + choice, by expert
        counts = experts.bincount(minlength=num_experts).tolist()
        tokens, factors = pairs // top_k, shares.flatten()[pairs].unsqueeze(1)
        out = torch.zeros(x.shape, dtype=torch.float32)
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                own = slice(begin, begin + count)
                read, factor = x[tokens[own]], factors[own]
                if self._spec.weighs_input:
                    read = (read * factor).to(x.dtype)
                made = _mlp(self._weights.experts[expert], self._activate, read).float()
                if not self._spec.weighs_input:
                    made.mul_(factor)
                out.index_add_(0, tokens[own], made)
                begin += count
        return out.to(x.dtype)


def _adapted_mlp(
    weights: MlpWeights,
    activate: Activate,
    names: tuple[str, str],
    x: torch.Tensor,
    adapters: Adapters | None,
) -> torch.Tensor:
    if adapters is None:
        return _mlp(weights, activate, x)
    inner = activate(adapters.add(weights.gate_up(x), x, names[0]))
    return adapters.add(weights.down(inner), inner, names[1])


def _mlp(weights: MlpWeights, activate: Activate, x: torch.Tensor) -> torch.Tensor:
    return weights.down(activate(weights.gate_up(x)))


def _activation(spec: DecoderSpec, operations: Operations) -> Activate:
    """From the (gate and) up projection to what goes down."""
    if isinstance(spec.activation, ClampedSwiglu):
        clamped = spec.activation
        return lambda gate_up: operations.clamped_swiglu(gate_up, clamped.alpha, clamped.limit)
    if spec.gated:
        if spec.activation == "silu":
            return operations.silu_mul
        if spec.activation == "gelu_tanh":
            return operations.gelu_mul
        return _gelu_mul
    if spec.activation == "silu":
        return functional.silu
    approximate = "tanh" if spec.activation == "gelu_tanh" else "none"
    return partial(functional.gelu, approximate=approximate)


def _gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate).mul_(up)

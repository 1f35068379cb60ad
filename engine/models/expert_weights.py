"""The loaded weights of MLPs and of mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.models.linear import Linear, LinearMethod, Weight
from engine.models.loader import load_matrix
from engine.models.norms import NormWeights
from engine.models.spec import DecoderSpec, MoeSpec
from kernels.moe import ExpertTensors, RouterWeights


class MlpWeights(NamedTuple):
    """Two projections with an activation between them."""

    gate_up: Linear  # without a gate if the MLP has none
    down: Linear
    xielu: torch.Tensor | None = None  # [4] float32, the activation's coefficients

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        return self.gate_up.num_bytes + self.down.num_bytes


class LatentProjections(NamedTuple):
    """Projections around experts that read a latent instead of the hidden state."""

    to_latent: Linear
    from_latent: Linear

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        return self.to_latent.num_bytes + self.from_latent.num_bytes


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A mixture of experts, either stacked into tensors of all experts or one by one."""

    router: RouterWeights
    stacked: ExpertTensors | None
    experts: tuple[MlpWeights, ...]  # empty if they are stacked
    shared: MlpWeights | None
    shared_gate: torch.Tensor | None  # [1, hidden_size]
    scale: torch.Tensor | None = None  # [num_experts] float32, a factor of its output
    latent: LatentProjections | None = None  # None: experts read hidden states

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        tensors = (*self.router, self.shared_gate, self.scale, *(self.stacked or ()))
        mlps = (*self.experts, self.shared, self.latent)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None) + sum(
            mlp.num_bytes for mlp in mlps if mlp is not None
        )


class ExpertsAlongsideWeights(NamedTuple):
    """A mixture of experts beside a layer's MLP, and the norms of both."""

    post_mlp_norm: NormWeights
    experts_norm: NormWeights
    experts: ExpertWeights
    post_experts_norm: NormWeights
    router_norm: torch.Tensor  # [hidden_size]

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        parts = (self.post_mlp_norm, self.experts_norm, self.experts, self.post_experts_norm)
        return sum(part.num_bytes for part in parts) + self.router_norm.nbytes


def make_experts(
    moe: MoeSpec,
    weights: Mapping[str, torch.Tensor],
    method: LinearMethod,
    i: int,
    *,
    stacked: bool,
) -> ExpertWeights:
    """Make the experts of layer ``i``; ``stacked``: as tensors of all of them.

    The layer takes ownership of the parameters.
    """

    def biases(name: str) -> torch.Tensor | None:
        tensor = weights.get(f"{i}.experts.{name}.bias")
        return None if tensor is None else tensor.unflatten(0, (moe.num_local_experts, -1))

    names = f"{i}.experts.gate_up", f"{i}.experts.down"
    gate_up_bias, down_bias = biases("gate_up"), biases("down")
    experts: tuple[MlpWeights, ...] = ()
    tensors: ExpertTensors | None = None
    if stacked:
        gate_up, down = (
            method.make_experts(load_matrix(weights, name), moe.num_local_experts) for name in names
        )
        tensors = ExpertTensors(gate_up, down, gate_up_bias, down_bias)
    else:
        gate_ups, downs = (
            _split_experts(load_matrix(weights, name), moe.num_local_experts) for name in names
        )
        experts = tuple(
            MlpWeights(
                method.make(gate_ups[e], None if gate_up_bias is None else gate_up_bias[e]),
                method.make(downs[e], None if down_bias is None else down_bias[e]),
            )
            for e in range(moe.num_local_experts)
        )
    shared = None
    if moe.shared_intermediate_size:
        parts = (load_matrix(weights, f"{i}.shared.{name}.weight") for name in ("gate_up", "down"))
        gate_up, down = (method.make(part, None) for part in parts)
        shared = MlpWeights(gate_up, down)
    latent = None
    if moe.latent_size:
        ways = (load_matrix(weights, f"{i}.latent.{name}.weight") for name in ("enter", "leave"))
        latent = LatentProjections(*(method.make(way, None) for way in ways))
    return ExpertWeights(
        router=RouterWeights(
            weights[f"{i}.router"],
            weights.get(f"{i}.router.bias"),
            weights.get(f"{i}.router.correction"),
        ),
        stacked=tensors,
        experts=experts,
        shared=shared,
        shared_gate=weights.get(f"{i}.shared.gate"),
        scale=weights.get(f"{i}.experts.scale"),
        latent=latent,
    )


def make_experts_alongside(
    spec: DecoderSpec,
    weights: Mapping[str, torch.Tensor],
    method: LinearMethod,
    i: int,
    *,
    stacked: bool,
) -> ExpertsAlongsideWeights:
    """Make the experts beside the MLP of layer ``i``, and the norms of both."""
    assert spec.moe is not None
    return ExpertsAlongsideWeights(
        post_mlp_norm=NormWeights(weights[f"{i}.mlp_own_after"]),
        experts_norm=NormWeights(weights[f"{i}.experts_norm"]),
        experts=make_experts(spec.moe, weights, method, i, stacked=stacked),
        post_experts_norm=NormWeights(weights[f"{i}.experts_after"]),
        router_norm=weights[f"{i}.router.norm"] * spec.hidden_size**-0.5,
    )


def _split_experts(weight: Weight, count: int) -> tuple[Weight, ...]:
    if isinstance(weight, torch.Tensor):
        return weight.unflatten(0, (count, -1)).unbind(0)
    return weight.split(count)

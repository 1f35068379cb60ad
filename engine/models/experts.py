"""The per-token part of a layer: an MLP, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from engine.models.adapters import Adapters
from engine.models.expert_weights import (
    ExpertsAlongsideWeights,
    ExpertWeights,
    LatentProjections,
    MlpWeights,
)
from engine.models.mlp import Activate, Mlp, bind_activation
from engine.models.norms import bind_norm
from engine.models.peers import Peers
from engine.models.spec import DecoderSpec, MoeSpec
from kernels.cpu.experts import PanelExperts
from kernels.moe import Activation, ExpertMatrices, GatedActivation, RoutingRule
from kernels.operations import Operations
from kernels.reference.moe import sequential_moe
from kernels.tiled import TiledWeight

FeedForward = Callable[[torch.Tensor, Adapters | None], torch.Tensor]
# (tokens [n, hidden_size], their expert ids, the experts' weights, the shared expert's output or
# None) -> [n, hidden_size].
ExpertsForward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor
]


def bind_mlp(
    spec: DecoderSpec, weights: MlpWeights | ExpertWeights, operations: Operations, index: int
) -> FeedForward:
    """Make the MLP of layer ``index``: [n, hidden_size] -> [n, hidden_size], in a new tensor."""
    layer = spec.layers[index - spec.first_layer]
    if isinstance(weights, MlpWeights):
        activate = bind_activation(
            *(spec, operations, weights.xielu, layer.gate_limit, layer.activation_sparsity)
        )
        names = f"{index}.gate_up.weight", f"{index}.down.weight"
        return partial(_apply_mlp, Mlp(weights, activate), names)
    assert spec.moe is not None
    activate, activate_shared = (
        bind_activation(spec, operations, limit=limit)
        for limit in (layer.expert_gate_limit, layer.gate_limit)
    )
    return Experts(spec.moe, weights, activate, operations, index, activate_shared)


def routing_rule(spec: MoeSpec) -> RoutingRule:
    """Return how a model's tokens choose experts."""
    return RoutingRule(
        top_k=spec.top_k,
        scoring=spec.scoring,
        normalised=spec.normalised,
        scale=spec.scale,
        num_groups=spec.num_groups,
        top_groups=spec.top_groups,
        group_best=spec.group_best,
        margin=spec.margin,
    )


class Experts:
    """A mixture of experts (Shazeer et al. 2017), and the shared expert that all tokens use.

    Where possible all experts of a layer are computed at once: stacked ones by a grouped product
    that does not wait for the device, those in a CPU's panel format by one native call. Otherwise
    each chosen expert is an MLP of its own, run on the tokens that chose it.
    """

    def __init__(
        self,
        spec: MoeSpec,
        weights: ExpertWeights,
        activate: Activate,
        operations: Operations,
        index: int,
        activate_shared: Activate | None = None,
    ) -> None:
        self._route = operations.route
        self._router = weights.router
        self._rule = routing_rule(spec)
        # [num_experts, 1], a factor for each expert's result.
        self._scales = None if weights.scale is None else weights.scale.unsqueeze(1)
        self._shared = None
        if weights.shared is not None:
            self._shared = Mlp(weights.shared, activate_shared or activate)
        self._shared_scale = spec.shared_scale
        self._identity_scale = spec.identity_scale if spec.num_identity_experts else None
        self._num_experts = spec.num_experts
        self._shared_names = f"{index}.shared.gate_up.weight", f"{index}.shared.down.weight"
        self._local_experts, self._num_local_experts = (
            spec.local_expert_range,
            spec.num_local_experts,
        )
        self._forward_experts = _bind(spec, weights, activate, operations)
        if weights.latent is not None:
            self._forward_experts = partial(_in_latent, self._forward_experts, weights.latent)
        stacked = weights.stacked
        # Layers with the same form use the same kernels.
        self.kernel_key = () if stacked is None else tuple(map(_kernel_key, stacked))
        self.kernel_sizes: tuple[int, ...] = ()  # smallest number of tokens for each of them
        if stacked is not None:
            self.kernel_sizes = operations.moe_token_thresholds(stacked.num_experts, spec.top_k)

    def warm_up(self, num_tokens: int, dtype: torch.dtype) -> None:
        """Run it once with ``num_tokens`` tokens, to compile and choose the kernels.

        ``dtype`` is the model's; the router may have another.
        """
        weight = self._router[0]
        self(weight.new_zeros((num_tokens, weight.shape[1]), dtype=dtype), None)

    def __call__(
        self, x: torch.Tensor, adapters: Adapters | None, routed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[n, hidden_size] -> [n, hidden_size].

        Only the shared expert takes adapters; those of other experts are not loaded. On a rank with
        some of the experts, the result excludes the others. ``routed`` is the router's input, if it
        is not ``x``.
        """
        ids, shares = self._route(x if routed is None else routed, *self._router, self._rule)
        if self._scales is not None:
            shares = shares.mul_(functional.embedding(ids, self._scales).squeeze(-1))
        passed: torch.Tensor | None = None
        if self._identity_scale is not None:
            is_identity = ids >= self._num_experts
            passed = (shares * is_identity).sum(dim=1, keepdim=True).mul_(self._identity_scale)
            ids = ids.clamp(max=self._num_experts)  # masked
        if self._local_experts is not None:  # renumbered as held here; others are masked
            ids = ids - self._local_experts[0]
            ids = ids.masked_fill_(
                (ids < 0) | (ids >= self._num_local_experts), self._num_local_experts
            )
        shared = None
        if self._shared is not None:
            shared = _apply_mlp(self._shared, self._shared_names, x, adapters)
            if self._shared_scale != 1.0:
                shared = shared.mul_(self._shared_scale)
        out = self._forward_experts(x, ids, shares, shared)
        return out if passed is None else out.add_((x * passed).to(out.dtype))


class ExpertsAlongside:
    """A mixture of experts beside a layer's MLP (Gemma 4).

    Each reads the residual stream through its own norm; their outputs are normed and added.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: ExpertsAlongsideWeights,
        operations: Operations,
        index: int,
        peers: Peers | None,
    ) -> None:
        assert spec.moe is not None
        activate = bind_activation(spec, operations)
        self.experts = Experts(spec.moe, weights.experts, activate, operations, index)
        self._norm = bind_norm(spec.norm, weights.experts_norm, operations)
        self._post_mlp_norm = bind_norm(spec.norm, weights.post_mlp_norm, operations)
        self._post_experts_norm = bind_norm(spec.norm, weights.post_experts_norm, operations)
        self._router_norm = weights.router_norm
        self._rms_norm, self._eps = operations.rms_norm, spec.norm.eps
        self._peers = peers

    def __call__(self, out: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """Add the MLP's output (not yet summed over ranks) and the experts', over all ranks.

        Both the output and the residual stream are [n, hidden_size]; returns [n, hidden_size].
        """
        routed = self._rms_norm(stream, self._router_norm, self._eps)
        mixed = self.experts(self._norm(stream), None, routed)
        if self._peers is not None:
            out, mixed = self._peers.all_reduce(torch.stack((out, mixed))).unbind()
        return self._post_mlp_norm(out).add_(self._post_experts_norm(mixed))


def _kernel_key(part: ExpertMatrices | None) -> object:
    """Return what the kernels depend on, of a layer's matrices or biases."""
    if isinstance(part, TiledWeight):
        return part.kind, part.group_size, part.codes.shape
    return None if part is None else (part.shape, part.stride())


def _apply_mlp(
    mlp: Mlp, names: tuple[str, str], x: torch.Tensor, adapters: Adapters | None
) -> torch.Tensor:
    return mlp(x) if adapters is None else mlp.forward_with_adapters(x, adapters, names)


def _bind(
    spec: MoeSpec, weights: ExpertWeights, activate: Activate, operations: Operations
) -> ExpertsForward:
    if weights.stacked is not None:
        return partial(_stacked, spec, weights, activate, operations)
    panels = None
    if isinstance(activate, GatedActivation | Activation):
        panels = PanelExperts.join(
            [expert.gate_up for expert in weights.experts],
            [expert.down for expert in weights.experts],
            activate,
            spec.top_k,
            apply_router_weight_on_input=spec.apply_router_weight_on_input,
            shared_gate=weights.shared_gate,
        )
    if panels is not None:
        return panels
    experts = [Mlp(expert, activate) for expert in weights.experts]
    return partial(_each, spec, experts, weights.shared_gate, operations)


def _stacked(
    spec: MoeSpec,
    weights: ExpertWeights,
    activate: Activate,
    operations: Operations,
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    assert weights.stacked is not None
    some_elsewhere = spec.local_expert_range is not None or spec.num_identity_experts > 0
    how = activate, spec.apply_router_weight_on_input, some_elsewhere
    out = operations.fused_moe(x, weights.stacked, ids, shares, *how)
    return _add_shared(out, shared, weights.shared_gate, x, operations)


def _each(
    spec: MoeSpec,
    experts: list[Mlp],
    shared_gate: torch.Tensor | None,
    operations: Operations,
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    out = sequential_moe(x, experts, ids, shares, spec.apply_router_weight_on_input)
    return _add_shared(out, shared, shared_gate, x, operations)


def _in_latent(
    mix: ExpertsForward,
    latent: LatentProjections,
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """Apply experts to a latent (Nemotron 3 Super); the shared expert reads hidden states."""
    out = latent.from_latent(mix(latent.to_latent(x), ids, shares, None))
    return out if shared is None else out.add_(shared)


def _add_shared(
    out: torch.Tensor,
    shared: torch.Tensor | None,
    gate: torch.Tensor | None,
    x: torch.Tensor,
    operations: Operations,
) -> torch.Tensor:
    """Add the shared expert's output to ``out``; both are overwritten."""
    if shared is None:
        return out
    return out.add_(shared) if gate is None else operations.add_gated(out, shared, x, gate)

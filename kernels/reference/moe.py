"""A mixture of experts in plain torch: the reference of the grouped matrix product."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from kernels.moe import (
    MIN_WEIGHT_SUM,
    ExpertMatrices,
    ExpertTensors,
    GatedActivation,
    RouterWeights,
    RoutingRule,
)
from kernels.reference.layers import rms_norm, silu_mul
from kernels.skinny import RowNorm
from kernels.tiled import TiledWeight


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    rule: RoutingRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``top_k`` experts with the highest scores, and their weights.

    With groups (DeepSeek-AI 2024) only the ``top_groups`` best groups count; a group's score is the
    sum of its ``group_best`` best experts' scores. With ``sparse_mixer`` (Liu et al. 2024, arXiv
    2409.12136, without its noise) a choice's weight is its softmax among the experts not chosen
    before it, of which those count whose output s has ``best - s <= margin * max(|s|, best)``.

    Args:
        x: [n, hidden].
        weight, bias: of the router's product, [experts, hidden] and [experts]; it is computed in
            their dtype.
        correction: [experts] float32, added to the scores for the choice only.
        rule: how experts are scored, grouped and weighted.

    Returns:
        Experts [n, top_k] int64, in no particular order, and their weights [n, top_k] float32.
    """
    said = functional.linear(x.to(weight.dtype), weight, bias).float()
    if rule.scoring == "sparse_mixer":
        ids, shares = _sparse_mixer(said, rule)
    else:
        scores = said if rule.scoring == "late_sigmoid" else said.sigmoid()
        if rule.scoring == "softmax":
            scores = said.softmax(dim=-1)
        chosen_by = scores if correction is None else scores + correction
        if rule.num_groups > 1:
            chosen_by = _within_groups(chosen_by, rule)
        ids = chosen_by.topk(rule.top_k, dim=-1).indices
        shares = scores.gather(-1, ids)
        if rule.scoring == "late_sigmoid":
            shares = shares.sigmoid()
    if rule.normalised:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + MIN_WEIGHT_SUM)
    return ids, shares if rule.scale == 1.0 else shares * rule.scale


def _sparse_mixer(said: torch.Tensor, rule: RoutingRule) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, experts] -> experts and weights [n, top_k], in descending order of output."""
    rest, ids, shares = said, [], []
    for _ in range(rule.top_k):
        best, choice = rest.max(dim=-1, keepdim=True)  # the first of equals
        is_far = best - said > rule.margin * said.abs().maximum(best)
        near = rest.masked_fill(is_far, -torch.inf)
        ids.append(choice)
        shares.append(1 / (near - best).exp().sum(dim=-1, keepdim=True))
        rest = rest.scatter(-1, choice, -torch.inf)
    return torch.cat(ids, dim=-1), torch.cat(shares, dim=-1)


def _within_groups(scores: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """Set the scores outside a token's best groups to -inf."""
    grouped = scores.unflatten(-1, (rule.num_groups, -1))
    of_groups = grouped.topk(rule.group_best, dim=-1).values.sum(dim=-1)
    best = of_groups.topk(rule.top_groups, dim=-1).indices
    is_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(-2)


def fused_moe(
    x: torch.Tensor,
    experts: ExpertTensors,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
    apply_router_weight_on_input: bool = False,
    some_elsewhere: bool = False,
) -> torch.Tensor:
    """``sum_j w_j * expert_j(x)`` over each token's experts.

    Args:
        x: [n, hidden].
        experts: MLPs.
        expert_ids: [n, top_k] int64, distinct for each token. The number of experts itself stands
            for any expert on another rank: nothing is added for it.
        expert_weights: [n, top_k] float32.
        activate: from [rows, 2 * inner] to [rows, inner], or without a gate from [rows, inner];
            None: SiLU of the gate, times up.
        apply_router_weight_on_input: ``sum_j expert_j(w_j * x)`` instead; only for experts
            without biases.
        some_elsewhere: there may be such ids, for which kernels that write every pair write zeros.

    Returns:
        [n, hidden] in x's dtype, summed in float32.
    """
    assert not (apply_router_weight_on_input and experts.gate_up_bias is not None)
    output = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    output = output.to(x.device)
    for expert in range(experts.num_experts):
        token, choice = torch.nonzero(expert_ids == expert, as_tuple=True)
        gate_up, down = (_matrix(part, expert, x.dtype) for part in experts[:2])
        biases = [None if part is None else part[expert] for part in experts[2:]]
        weight = expert_weights[token, choice].unsqueeze(1)
        read = (x[token] * weight).to(x.dtype) if apply_router_weight_on_input else x[token]
        inner = (activate or silu_mul)(functional.linear(read, gate_up, biases[0]))
        made = functional.linear(inner, down, biases[1]).to(output.dtype)
        output.index_add_(0, token, made if apply_router_weight_on_input else made * weight)
    return output.to(x.dtype)


def add_experts(
    stream: torch.Tensor,
    norm: RowNorm,
    router: RouterWeights,
    rule: RoutingRule,
    experts: ExpertTensors,
    gating: GatedActivation,
) -> None:
    """``stream += fused_moe(norm(stream))`` for up to ``MAX_SKINNY_ROWS`` tokens, rounded once if
    possible.

    Args:
        stream: [n, hidden] contiguous, updated in place.
        norm: of the input of the router and the experts.
        router, rule: see ``route``.
        experts: dense ones are contiguous.
        gating: the function between their products.
    """
    read = rms_norm(stream, norm.weight, norm.eps)
    ids, shares = route(read, *router, rule)
    stream += fused_moe(read, experts, ids, shares, gating)


def add_gated(
    out: torch.Tensor, shared: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """``out + sigmoid(x weight^T) * shared``: add the shared expert's output, gated per token.

    Args:
        out: [n, hidden], overwritten.
        shared: [n, hidden].
        x: [n, hidden].
        weight: [1, hidden].

    Returns:
        ``out``.
    """
    return out.add_(shared * torch.sigmoid(functional.linear(x, weight)))


def sequential_moe(
    x: torch.Tensor,
    experts: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    """``fused_moe`` for experts that are functions: [rows, hidden] -> [rows, hidden].

    Each is called at most once, with the tokens that chose it. This waits for the device.
    """
    top_k = expert_ids.shape[1]
    chosen = expert_ids.flatten()
    pairs = chosen.argsort(stable=True)  # token * top_k + choice, by expert
    counts = chosen.bincount(minlength=len(experts) + 1).tolist()[:-1]
    tokens, factors = pairs // top_k, expert_weights.flatten()[pairs].unsqueeze(1)
    output = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    begin = 0
    for expert, count in zip(experts, counts, strict=True):
        if count:
            own = slice(begin, begin + count)
            read, factor = x[tokens[own]], factors[own]
            if apply_router_weight_on_input:
                read = (read * factor).to(x.dtype)
            made = expert(read).float()
            output.index_add_(
                0, tokens[own], made if apply_router_weight_on_input else made * factor
            )
            begin += count
    return output.to(x.dtype)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """``(up + 1) * gate * sigmoid(alpha * gate)`` (GPT-OSS): [n, 2 d] -> [n, d].

    Before, the gate is clamped from above and up on both sides, to ``limit``.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_up.dtype)


def clamped_silu_mul(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """``min(silu(gate), limit) * up`` with up clamped to ``limit`` on both sides (Step-3.7).

    [n, 2 d] -> [n, d].
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)).to(gate_up.dtype)


def _matrix(part: ExpertMatrices, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [outputs, inputs] of one expert; codes are widened."""
    return part.matrix(expert, dtype) if isinstance(part, TiledWeight) else part[expert]


def moe_token_thresholds(num_experts: int, top_k: int) -> tuple[int, ...]:
    """Return the smallest number of tokens for each of ``fused_moe``'s kernels, in ascending order.

    They depend on the number of experts, and on ``top_k``, those of a token. Here there is one
    kernel.
    """
    return (1,)

"""Mixture of experts: two grouped matrix products over rows sorted by expert.

    (token, choice) pairs ─► sorted by expert, each expert's run divided into tiles
                                 │
    x rows gathered ─► x W_gate_up^T ─► activate ─► x W_down^T * weight ─► sum over choices

Tiles are sorted as in MegaBlocks (Gale et al. 2022). The host knows an upper bound of the number of
tiles, the device computes where each tile is, and programs past the last tile exit at once. Nothing
waits for the routing, and a captured graph serves any routing.

A step of few tokens does not sort: each pair is a row of a product of few rows (``skinny.py``),
which fuses the norm before it and the gate after it; the sum is added to the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.moe import ExpertMatrices, ExpertTensors, GatedActivation, RouterWeights, RoutingRule
from kernels.skinny import GateKind, RowNorm, fused_gate_kind
from kernels.tiled import TiledWeight
from kernels.triton.grouped import grouped_matmul
from kernels.triton.layers import silu_mul
from kernels.triton.routing import Routing, select_experts, sort_pairs
from kernels.triton.skinny import skinny_linear
from kernels.triton.skinny_packed import skinny_packed_linear
from kernels.triton.sums import sum_parts


def fused_moe(
    x: torch.Tensor,
    experts: ExpertTensors,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
    apply_router_weight_on_input: bool = False,
    some_elsewhere: bool = False,
) -> torch.Tensor:
    """See ``kernels.reference.moe.fused_moe``; all contiguous."""
    routing = sort_pairs(expert_ids, experts.num_experts, has_remote_pairs=some_elsewhere)
    first = apply_router_weight_on_input
    return _run_experts(x, experts, routing, expert_weights, activate, weight_inputs=first)


def invariant_moe(
    x: torch.Tensor,
    experts: ExpertTensors,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
    apply_router_weight_on_input: bool = False,
    some_elsewhere: bool = False,
) -> torch.Tensor:
    """``fused_moe`` whose results for a token have the same bits in any batch.

    With dense weights ``fused_moe`` has this property anyway; with codes it has two ways to widen
    them, of which this takes one for any batch, and products must not be fused with sums.
    """
    routing = sort_pairs(expert_ids, experts.num_experts, has_remote_pairs=some_elsewhere)
    first = apply_router_weight_on_input
    return _run_experts(
        x, experts, routing, expert_weights, activate, weight_inputs=first, invariant=True
    )


def _run_experts(
    x: torch.Tensor,
    experts: ExpertTensors,
    routing: Routing,
    expert_weights: torch.Tensor,
    activate: Callable[[torch.Tensor], torch.Tensor] | None,
    *,
    weight_inputs: bool,
    invariant: bool = False,
) -> torch.Tensor:
    num_tokens, top_k = expert_weights.shape
    gate_up, down, gate_up_bias, down_bias = experts
    # Without a bias, an expert's input can be weighted after its first product.
    before, after = (expert_weights, None) if weight_inputs else (None, expert_weights)
    product = partial(grouped_matmul, invariant=invariant)
    projected = product(x, gate_up, routing, top_k, before, gate_up_bias)
    inner = (activate or silu_mul)(projected)
    expanded = product(inner, down, routing, 1, after, down_bias)
    out = torch.empty((num_tokens, expanded.shape[1]), dtype=x.dtype, device=x.device)
    return sum_parts(expanded, out)


def add_experts(
    stream: torch.Tensor,
    norm: RowNorm,
    router: RouterWeights,
    rule: RoutingRule,
    experts: ExpertTensors,
    gating: GatedActivation,
) -> None:
    """See ``kernels.reference.moe.add_experts``; five launches, and one more for a gate that is
    not built in."""
    said = skinny_linear(stream, *router[:2], norm=norm, dtype=router.weight.dtype)
    ids, shares = select_experts(said, router.correction, rule, experts.num_experts)
    gate = fused_gate_kind(gating)
    inner = _skinny_experts(
        stream, experts.gate_up, experts.gate_up_bias, ids, norm=norm, gate=gate
    )
    if gate is None:
        inner = gating(inner)
    made = _skinny_experts(inner, experts.down, experts.down_bias, ids.view(-1, 1))
    sum_parts(made, stream, shares, adds=True)


def _skinny_experts(
    x: torch.Tensor,
    weights: ExpertMatrices,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    *,
    norm: RowNorm | None = None,
    gate: GateKind | None = None,
) -> torch.Tensor:
    """Compute the products of few tokens' experts, pair by pair."""
    if isinstance(weights, TiledWeight):
        return skinny_packed_linear(x, weights, bias, norm=norm, gate=gate, experts=ids)
    return skinny_linear(x, weights, bias, norm=norm, gate=gate, experts=ids)

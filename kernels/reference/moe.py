"""A mixture of experts in plain torch: the twin of the grouped matrix product."""

from __future__ import annotations

import torch

from kernels.reference.layers import silu_mul


def fused_moe(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
) -> torch.Tensor:
    """``sum_j w_j * expert_j(x)`` over each token's experts, gated MLPs with SiLU.

    Args:
        x: [n, hidden].
        gate_up: [experts, 2 * inner, hidden].
        down: [experts, hidden, inner].
        expert_ids: [n, top_k] int64, different ones for a token.
        expert_weights: [n, top_k] float32.

    Returns:
        [n, hidden] in x's dtype, summed in float32.
    """
    output = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    output = output.to(x.device)
    for expert in range(gate_up.shape[0]):
        token, choice = torch.nonzero(expert_ids == expert, as_tuple=True)
        inner = silu_mul(x[token] @ gate_up[expert].T)
        weight = expert_weights[token, choice].unsqueeze(1)
        output.index_add_(0, token, (inner @ down[expert].T).to(output.dtype) * weight)
    return output.to(x.dtype)

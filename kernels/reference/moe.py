"""A mixture of experts in plain torch: the twin of the grouped matrix product."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from kernels.moe import ExpertMatrices, ExpertTensors
from kernels.reference.layers import silu_mul
from kernels.tiled import TiledWeight


def fused_moe(
    x: torch.Tensor,
    experts: ExpertTensors,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
    weighs_input: bool = False,
) -> torch.Tensor:
    """``sum_j w_j * expert_j(x)`` over each token's experts.

    Args:
        x: [n, hidden].
        experts: gated MLPs.
        expert_ids: [n, top_k] int64, different ones for a token.
        expert_weights: [n, top_k] float32.
        activate: from [rows, 2 * inner] to [rows, inner]; None: SiLU of the gate, times up.
        weighs_input: ``sum_j expert_j(w_j * x)`` instead; only for experts without biases.

    Returns:
        [n, hidden] in x's dtype, summed in float32.
    """
    assert not (weighs_input and experts.gate_up_bias is not None)
    output = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    output = output.to(x.device)
    for expert in range(experts.num_experts):
        token, choice = torch.nonzero(expert_ids == expert, as_tuple=True)
        gate_up, down = (_matrix(part, expert, x.dtype) for part in experts[:2])
        biases = [None if part is None else part[expert] for part in experts[2:]]
        weight = expert_weights[token, choice].unsqueeze(1)
        read = (x[token] * weight).to(x.dtype) if weighs_input else x[token]
        inner = (activate or silu_mul)(functional.linear(read, gate_up, biases[0]))
        made = functional.linear(inner, down, biases[1]).to(output.dtype)
        output.index_add_(0, token, made if weighs_input else made * weight)
    return output.to(x.dtype)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """``(up + 1) * gate * sigmoid(alpha * gate)`` (GPT-OSS): [n, 2 d] -> [n, d].

    The gate is clamped from above and up on both sides, to ``limit``.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_up.dtype)


def _matrix(part: ExpertMatrices, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """[outputs, inputs] of one expert; codes are widened."""
    return part.matrix(expert, dtype) if isinstance(part, TiledWeight) else part[expert]

"""LoRA adapters as two grouped matrix products."""

from __future__ import annotations

import torch

from kernels.lora import AdapterRows, AdapterWeights
from kernels.triton.moe import grouped_matmul
from kernels.triton.routing import sort_pairs


def add_adapters(
    out: torch.Tensor, x: torch.Tensor, weights: AdapterWeights, rows: AdapterRows
) -> torch.Tensor:
    """See ``kernels.reference.lora.add_adapters``. A token without an adapter goes through the
    first slot with factor 0."""
    slots = rows.slots.clamp(min=0).unsqueeze(1)
    routing = sort_pairs(slots, weights.down.shape[0])
    inner = grouped_matmul(x, weights.down, routing, 1, None)
    factors = (rows.slots >= 0).to(torch.float32)
    return out.add_(grouped_matmul(inner, weights.up.transpose(1, 2), routing, 1, factors))

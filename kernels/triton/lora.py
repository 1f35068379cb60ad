"""LoRA adapters as two grouped matrix products."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.lora import AdapterRows, AdapterWeights
from kernels.triton.grouped import grouped_matmul
from kernels.triton.routing import Routing, sort_pairs


class _Plan(NamedTuple):
    """What the layers of a step share."""

    routing: Routing  # each token's slot; the first one for tokens without an adapter
    factors: torch.Tensor  # [n] float32: 0 for tokens without an adapter, else 1


def plan_adapters(rows: AdapterRows, num_slots: int) -> AdapterRows:
    """See ``kernels.reference.lora.plan_adapters``: the tokens by slot, on the device."""
    routing = sort_pairs(rows.slots.clamp(min=0).unsqueeze(1), num_slots)
    return rows._replace(plan=_Plan(routing, (rows.slots >= 0).to(torch.float32)))


def add_adapters(
    out: torch.Tensor, x: torch.Tensor, weights: AdapterWeights, rows: AdapterRows
) -> torch.Tensor:
    """See ``kernels.reference.lora.add_adapters``. A token without an adapter goes through the
    first slot with factor 0, which leaves nothing of it, not even what is not finite."""
    if rows.plan is None:
        rows = plan_adapters(rows, weights.down.shape[0])
    routing, factors = rows.plan
    inner = grouped_matmul(x, weights.down, routing, 1, None)
    return out.add_(grouped_matmul(inner, weights.up.transpose(1, 2), routing, 1, factors))

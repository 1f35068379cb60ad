"""Adapters of several rows in plain torch: the reference of the grouped products."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.lora import AdapterRows, AdapterWeights

# Tokens of one adapter from which a separate product is worth its calls.
_LONG_GROUP = 16


def plan_adapters(rows: AdapterRows, num_slots: int) -> AdapterRows:
    """Return the rows with what all layers of a step share: nothing here.

    Args:
        rows: the tokens' slots.
        num_slots: of each layer's adapters.
    """
    return rows


def add_adapters(
    out: torch.Tensor, x: torch.Tensor, weights: AdapterWeights, rows: AdapterRows
) -> torch.Tensor:
    """``out[t] += up[s]^T @ down[s] @ x[t]`` for each token t with an adapter in slot s, in place.

    Returns ``out``. A few tokens of many adapters go through all slots at once, with other slots
    masked between the two products: ranks are so small that this costs less than a product's calls
    for each adapter. Otherwise each adapter's tokens are a segment, as in Punica (Chen et al.
    2023), by index instead of sorted.

    Args:
        out: [n, outputs], contiguous.
        x: [n, inputs], contiguous.
        weights: of the layer.
        rows: the tokens' slots.
    """
    num_slots, rank, inputs = weights.down.shape
    groups = rows.groups.tolist()
    if len(groups) > 1 and x.shape[0] < _LONG_GROUP * len(groups):
        inner = functional.linear(x, weights.down.view(num_slots * rank, inputs))
        inner = inner.view(-1, num_slots, rank).masked_fill(~rows.slot_mask, 0)
        return out.add_(inner.view(-1, num_slots * rank) @ weights.up.flatten(0, 1))
    for slot, begin, end in groups:
        is_all = end - begin == x.shape[0]
        tokens = rows.order[begin:end]
        read = x if is_all else x.index_select(0, tokens)
        added = (read @ weights.down[slot].T) @ weights.up[slot]
        if is_all:
            out += added
        else:
            out.index_add_(0, tokens, added)
    return out

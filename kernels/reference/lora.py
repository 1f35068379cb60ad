"""Adapters of several rows, one after the other: the twin of the grouped products."""

from __future__ import annotations

import torch

from kernels.lora import AdapterRows, AdapterWeights


def add_adapters(
    out: torch.Tensor, x: torch.Tensor, weights: AdapterWeights, rows: AdapterRows
) -> torch.Tensor:
    """``out[t] += up[s] @ down[s] @ x[t]`` for each token t with an adapter in slot s, in place.

    Returns ``out``.

    Segments as in Punica (Chen et al. 2023), by index instead of sorted.

    Args:
        out: [n, outputs].
        x: [n, inputs], contiguous.
        weights: of the layer.
        rows: the tokens' slots.
    """
    for slot, tokens in rows.groups:
        is_all = tokens.numel() == x.shape[0]
        read = x if is_all else x.index_select(0, tokens)
        added = (read @ weights.down[slot].T) @ weights.up[slot].T
        if is_all:
            out += added
        else:
            out.index_add_(0, tokens, added)
    return out

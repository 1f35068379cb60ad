"""Adapters by ``native/lora.cpp``; for the contract see ``kernels.reference.lora``."""

from __future__ import annotations

import torch

from kernels.cpu.bindings import DTYPE_CODES, function
from kernels.lora import AdapterRows, AdapterWeights
from kernels.reference import lora as reference

# Prompt tokens of one adapter from which a library's product is faster: it uses the processor's
# matrix unit.
_LONG_GROUP = 64


def add_adapters(
    out: torch.Tensor, x: torch.Tensor, weights: AdapterWeights, rows: AdapterRows
) -> torch.Tensor:
    """See ``kernels.reference.lora.add_adapters``."""
    if rows.order.numel() >= _LONG_GROUP * len(rows.groups):
        return reference.add_adapters(out, x, weights, rows)
    return invariant_adapters(out, x, weights, rows)


def invariant_adapters(
    out: torch.Tensor, x: torch.Tensor, weights: AdapterWeights, rows: AdapterRows
) -> torch.Tensor:
    """``add_adapters`` whose results for a token have the same bits in any batch.

    Intermediate results stay in float32. A group without tokens is skipped: a recorded step has
    room for as many groups as it has tokens.
    """
    num_groups = len(rows.groups)
    _, rank, inputs = weights.down.shape
    function("quire_add_adapters")(
        DTYPE_CODES[x.dtype],
        weights.down.data_ptr(),
        weights.up.data_ptr(),
        weights.spans.data_ptr(),
        rank,
        inputs,
        out.shape[1],
        x.data_ptr(),
        rows.order.data_ptr(),
        rows.groups.ctypes.data,
        num_groups,
        out.data_ptr(),
    )
    return out

"""Random weights in every kind of code."""

from __future__ import annotations

import torch

from kernels.packed import INT4_LEVELS, MXFP4_LEVELS, NF4_LEVELS, PackedWeight, pack_nibbles

_LEVELS = {"int4": INT4_LEVELS, "nf4": NF4_LEVELS, "e2m1": MXFP4_LEVELS}
KINDS = (*_LEVELS, "int8", "e4m3")


def packed_weight(
    kind: str,
    outputs: int,
    inputs: int,
    group: int,
    *,
    zeros: bool = False,
    order: bool = False,
    seed: int = 0,
) -> PackedWeight:
    """Every possible code, scales of either sign, and non-integer zeros."""
    random = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group)
    scales = torch.rand(outputs, groups, generator=random) + 0.1
    scales *= torch.randint(0, 2, scales.shape, generator=random) * 2 - 1
    if kind in _LEVELS:
        codes = pack_nibbles(torch.randint(0, 16, (outputs, inputs), generator=random))
    else:
        codes = torch.randint(0, 256, (outputs, inputs), generator=random).to(torch.uint8)
        if kind == "e4m3":
            codes[(codes & 0x7F) == 0x7F] = 0  # not a number
        codes = codes.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    shift = torch.randn(outputs, groups, generator=random) * 3 if zeros else None
    turned = torch.randperm(inputs, generator=random) if order else None
    return PackedWeight(codes, scales, inputs, group, _LEVELS.get(kind), shift, turned)

"""A linear layer in plain torch, computed in float32 and rounded once."""

from __future__ import annotations

import torch
from torch.nn import functional


def invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x W^T + b``, each row's result being the same bits in any batch where a kernel does it.

    Args:
        x: [n, inputs].
        weight: [outputs, inputs].
        bias: [outputs] or None.

    Returns:
        [n, outputs] in the dtype of x.
    """
    as_float = None if bias is None else bias.float()
    return functional.linear(x.float(), weight.float(), as_float).to(x.dtype)

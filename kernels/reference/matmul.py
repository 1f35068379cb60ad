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


_ROWS = 16


def fixed_rows_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``invariant_linear`` by a library that picks its kernel by the number of rows.

    Rows are taken 16 at a time and the last ones padded, so that it always sees one shape.
    """
    num_rows = x.shape[0]
    padded = functional.pad(x, (0, 0, 0, -num_rows % _ROWS))
    parts = [functional.linear(rows, weight, bias) for rows in padded.split(_ROWS)]
    return torch.cat(parts)[:num_rows] if len(parts) > 1 else parts[0][:num_rows]

"""A linear layer in plain torch, computed in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional


def invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x W^T + b``; kernels give each row the same bits in any batch.

    Args:
        x: [n, inputs].
        weight: [outputs, inputs].
        bias: [outputs] or None.

    Returns:
        [n, outputs] in the dtype of x.
    """
    as_float = None if bias is None else bias.float()
    return functional.linear(x.float(), weight.float(), as_float).to(x.dtype)


def invariant_heads(x: torch.Tensor, weight: torch.Tensor, keep: int = 0) -> torch.Tensor:
    """Multiply each head by its own weight; kernels give each token the same bits in any batch.

    Args:
        x: [n, heads, inputs + keep].
        weight: [heads, outputs, inputs].
        keep: the last values of a head, which are copied.

    Returns:
        [n, heads, outputs + keep] in the dtype of x.
    """
    read, kept = x.split((x.shape[-1] - keep, keep), dim=-1)
    made = torch.bmm(read.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
    return torch.cat((made, kept), dim=-1) if keep else made.contiguous()


_ROWS = 16


def fixed_rows_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``invariant_linear`` through a library that chooses its kernel by the number of rows.

    Rows are processed 16 at a time, with padding, so that the library always sees one shape.
    """
    return _by_fixed_rows(x, lambda rows: functional.linear(rows, weight, bias))


def fixed_rows_heads(x: torch.Tensor, weight: torch.Tensor, keep: int = 0) -> torch.Tensor:
    """``invariant_heads`` in the same way."""
    return _by_fixed_rows(x, lambda rows: invariant_heads(rows, weight, keep))


def _by_fixed_rows(
    x: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    num_rows = x.shape[0]
    padded = torch.cat((x, x.new_zeros((-num_rows % _ROWS, *x.shape[1:]))))
    parts = [product(rows) for rows in padded.split(_ROWS)]
    return torch.cat(parts)[:num_rows] if len(parts) > 1 else parts[0][:num_rows]

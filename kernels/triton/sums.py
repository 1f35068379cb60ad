"""Sums of adjacent rows: a token's experts, or the parts of a product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.launch import launch, wait_for_prior_kernels

_COLUMNS = 512  # per program


def sum_parts(
    made: torch.Tensor, out: torch.Tensor, shares: torch.Tensor | None = None, *, adds: bool = False
) -> torch.Tensor:
    """Sum the parts of each row in float32, in order.

    Args:
        made: [n * parts, outputs], row by row, contiguous.
        out: [n, outputs], overwritten, or updated in place.
        shares: [n, parts] float32, their weights; None: all 1.
        adds: whether ``out`` is updated.

    Returns:
        ``out``.
    """
    num_rows, outputs = out.shape
    launch(
        _sum_kernel,
        (num_rows, -(-outputs // _COLUMNS)),
        out,
        made,
        shares,
        outputs,
        PARTS=made.shape[0] // max(num_rows, 1),
        COLUMNS=_COLUMNS,
        ADDS=adds,
        num_warps=4,
    )
    return out


@triton.jit
def _sum_kernel(
    out, made, shares, outputs, PARTS: tl.constexpr, COLUMNS: tl.constexpr, ADDS: tl.constexpr
):
    """Some outputs of one row."""
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < outputs
    total = tl.zeros([COLUMNS], tl.float32)
    for number in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        part = row * PARTS + number
        term = tl.load(made + part * outputs + columns, mask=is_column, other=0.0).to(tl.float32)
        if shares is not None:
            term *= tl.load(shares + part)
        total += term
    place = out + row * outputs + columns
    if ADDS:
        total += tl.load(place, mask=is_column, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=is_column)

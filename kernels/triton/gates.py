"""Gates on layers' outputs; contracts: ``kernels.reference.recurrent``,
``kernels.reference.moe``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.activations import OutputGateKind
from kernels.triton.launch import launch, power_of_2, wait_for_prior_kernels
from kernels.triton.recurrent import softplus
from kernels.triton.tiles import sigmoid

_TILE = 1024


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, gates_first: bool
) -> torch.Tensor:
    """See ``kernels.reference.recurrent.gated_rms_norm``."""
    num_rows, heads, dim = x.shape
    y = torch.empty((num_rows, heads * dim), dtype=x.dtype, device=x.device)
    width = power_of_2(dim)
    launch(
        _gated_norm_kernel,
        (num_rows, heads),
        *(y, x, gate, weight, gate.stride(0), eps),
        DIM=dim,
        WEIGHTS=weight.numel() // dim,
        GATES_FIRST=gates_first,
        WIDTH=width,
        num_warps=min(16, max(1, width // 512)),
    )
    return y


def apply_gate(x: torch.Tensor, gate: torch.Tensor, kind: OutputGateKind) -> torch.Tensor:
    """See ``kernels.reference.recurrent.apply_gate``; x is contiguous."""
    num_rows, dim = x.shape
    y = torch.empty_like(x)
    launch(
        _apply_gate_kernel,
        (num_rows, -(-dim // _TILE)),
        *(y, x, gate, gate.stride(0), dim),
        IS_ONE=gate.shape[1] == 1,
        KIND=kind,
        TILE=_TILE,
        num_warps=4,
    )
    return y


def add_gated(
    out: torch.Tensor, shared: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """See ``kernels.reference.moe.add_gated``, rounded once; all contiguous."""
    num_rows, dim = out.shape
    launch(
        _add_gated_kernel,
        (num_rows,),
        *(out, shared, x, weight, dim),
        TILE=_TILE,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["gate_stride"])
def _gated_norm_kernel(
    y,
    x,
    gate,
    weight,
    gate_stride,
    eps,
    DIM: tl.constexpr,
    WEIGHTS: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One head of one row per program."""
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    is_used = columns < DIM
    place = (row * tl.num_programs(1) + head) * DIM + columns
    value = tl.load(x + place, mask=is_used, other=0.0).to(tl.float32)
    by = tl.load(gate + row * gate_stride + head * DIM + columns, mask=is_used, other=0.0)
    by = by.to(tl.float32)
    by *= sigmoid(by)
    if GATES_FIRST:
        value *= by
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / DIM + eps)
    scale = tl.load(weight + head % WEIGHTS * DIM + columns, mask=is_used, other=0.0)
    value *= scale.to(tl.float32)
    if not GATES_FIRST:
        value *= by
    tl.store(y + place, value.to(y.dtype.element_ty), mask=is_used)


@triton.jit(do_not_specialize=["gate_stride"])
def _apply_gate_kernel(
    y,
    x,
    gate,
    gate_stride,
    dim,
    IS_ONE: tl.constexpr,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
):
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_used = columns < dim
    value = tl.load(x + row * dim + columns, mask=is_used, other=0.0).to(tl.float32)
    at = columns * 0 if IS_ONE else columns
    raw = tl.load(gate + row * gate_stride + at, mask=is_used, other=0.0).to(tl.float32)
    if KIND == "softplus":
        by = softplus(raw)
    elif KIND == "silu":
        by = raw * sigmoid(raw)
    else:
        by = sigmoid(raw)
    tl.store(y + row * dim + columns, (value * by).to(y.dtype.element_ty), mask=is_used)


@triton.jit
def _add_gated_kernel(out, shared, x, weight, dim, TILE: tl.constexpr):
    """One row: first its gate from all of x, then the gated addition."""
    wait_for_prior_kernels()
    begin = tl.program_id(0).to(tl.int64) * dim
    parts = tl.zeros([TILE], tl.float32)
    for first in range(0, dim, TILE):
        columns = first + tl.arange(0, TILE)
        value = tl.load(x + begin + columns, mask=columns < dim, other=0.0).to(tl.float32)
        by = tl.load(weight + columns, mask=columns < dim, other=0.0).to(tl.float32)
        parts += value * by
    gate = sigmoid(tl.sum(parts, axis=0))
    for first in range(0, dim, TILE):
        columns = first + tl.arange(0, TILE)
        added = tl.load(shared + begin + columns, mask=columns < dim, other=0.0).to(tl.float32)
        total = tl.load(out + begin + columns, mask=columns < dim, other=0.0).to(tl.float32)
        total += added * gate
        tl.store(out + begin + columns, total.to(out.dtype.element_ty), mask=columns < dim)

"""The element-wise parts of a decoder layer, each a single pass over its tensors.

All are memory-bound: their time is the bytes they read and write, and fusing them saves the bytes
of intermediate results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.reference.layers import rope
from kernels.triton.launch import launch, power_of_2, wait_for_prior_kernels
from kernels.triton.tiles import clamp, gelu_tanh, sigmoid, silu

_TILE = 1024


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """``residual += x`` in place, and the sum's norm; see
    ``kernels.reference.fused.add_rms_norm``."""
    num_rows, dim = residual.shape
    output = torch.empty_like(residual)
    width = power_of_2(dim)
    launch(
        _add_rms_norm_kernel,
        (num_rows,),
        output,
        residual,
        x,
        weight,
        x.stride(0),
        residual.stride(0),
        eps,
        DIM=dim,
        WIDTH=width,
        HAS_X=True,
        num_warps=_row_warps(width),
    )
    return output


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of [n, dim]; see ``kernels.reference.layers.rms_norm``."""
    num_rows, dim = x.shape
    output = torch.empty((num_rows, dim), dtype=x.dtype, device=x.device)
    width = power_of_2(dim)
    launch(
        _add_rms_norm_kernel,
        (num_rows,),
        output,
        x,
        x,
        weight,
        x.stride(0),
        x.stride(0),
        eps,
        DIM=dim,
        WIDTH=width,
        HAS_X=False,
        num_warps=_row_warps(width),
    )
    return output


def norm_rope(
    query: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """See ``kernels.reference.fused.norm_rope``; all heads share a weight, and torch rotates."""
    if norm_weight is not None:
        query = rms_norm(query.view(-1, query.shape[-1]), norm_weight[0], eps).view(query.shape)
    return query if rotation is None else rope(query, *rotation)


def rope_tables(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.reference.layers.rope_tables``; both tables in one launch."""
    num_tokens, half = positions.shape[0], inverse_frequencies.shape[0]
    tables = torch.empty((2, num_tokens, 1, half), dtype=torch.float32, device=positions.device)
    cos, sin = tables.unbind()
    launch(
        _rope_tables_kernel,
        (num_tokens,),
        cos,
        sin,
        positions,
        inverse_frequencies,
        scale,
        HALF_DIM=half,
        HALF=power_of_2(half),
        num_warps=1,
    )
    return cos, sin


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``kernels.reference.layers.silu_mul``; gate_up is contiguous."""
    return _activate_mul(gate_up, is_gelu=False)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``kernels.reference.fused.gelu_mul``; gate_up is contiguous."""
    return _activate_mul(gate_up, is_gelu=True)


def clamped_silu_mul(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """See ``kernels.reference.moe.clamped_silu_mul``; gate_up is contiguous."""
    num_rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((num_rows, dim), dtype=gate_up.dtype, device=gate_up.device)
    launch(
        _clamped_silu_kernel,
        (num_rows, -(-dim // _TILE)),
        *(output, gate_up, dim, limit),
        TILE=_TILE,
        num_warps=4,
    )
    return output


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """See ``kernels.reference.moe.clamped_swiglu``; gate_up is contiguous."""
    num_rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((num_rows, dim), dtype=gate_up.dtype, device=gate_up.device)
    launch(
        _clamped_swiglu_kernel,
        (num_rows, -(-dim // _TILE)),
        output,
        gate_up,
        dim,
        alpha,
        limit,
        TILE=_TILE,
        num_warps=4,
    )
    return output


def xielu(x: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """See ``kernels.reference.layers.xielu``."""
    num_rows, dim = x.shape
    output = torch.empty((num_rows, dim), dtype=x.dtype, device=x.device)
    launch(
        _xielu_kernel,
        (num_rows, -(-dim // _TILE)),
        output,
        x,
        coefficients,
        dim,
        x.stride(0),
        TILE=_TILE,
        num_warps=4,
    )
    return output


def _activate_mul(gate_up: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    num_rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((num_rows, dim), dtype=gate_up.dtype, device=gate_up.device)
    launch(
        _activate_mul_kernel,
        (num_rows, -(-dim // _TILE)),
        output,
        gate_up,
        dim,
        IS_GELU=is_gelu,
        TILE=_TILE,
        num_warps=4,
    )
    return output


def _row_warps(width: int) -> int:
    """Return the warps for one row: about two loads of 16 bytes for each thread."""
    return min(16, max(1, width // 512))


@triton.jit
def _add_rms_norm_kernel(
    output,
    residual,
    x,
    weight,
    x_stride,
    residual_stride,
    eps,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_X: tl.constexpr,
):
    """One row per program, held in registers between the sum and the scaling."""
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    is_used = columns < DIM
    place = residual + row * residual_stride + columns
    total = tl.load(place, mask=is_used, other=0.0).to(tl.float32)
    if HAS_X:
        total += tl.load(x + row * x_stride + columns, mask=is_used, other=0.0).to(tl.float32)
        # The norm is of the sum as stored, rounded.
        rounded = total.to(residual.dtype.element_ty)
        tl.store(place, rounded, mask=is_used)
        total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / DIM + eps)
    by = tl.load(weight + columns, mask=is_used, other=0.0).to(tl.float32)
    normed = (total * scale * by).to(output.dtype.element_ty)
    tl.store(output + row * DIM + columns, normed, mask=is_used)


# Positions may be a column of several, with any alignment.
@triton.jit(do_not_specialize_on_alignment=["sin", "positions"])
def _rope_tables_kernel(
    cos, sin, positions, frequencies, scale, HALF_DIM: tl.constexpr, HALF: tl.constexpr
):
    """One token. The angle is rounded to float32, as in the reference."""
    wait_for_prior_kernels()
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, HALF)
    is_used = dims < HALF_DIM
    position = tl.load(positions + token).to(tl.float32)
    angle = position * tl.load(frequencies + dims, mask=is_used, other=0.0)
    place = token * HALF_DIM + dims
    tl.store(cos + place, tl.cos(angle) * scale, mask=is_used)
    tl.store(sin + place, tl.sin(angle) * scale, mask=is_used)


@triton.jit
def _activate_mul_kernel(output, gate_up, dim, IS_GELU: tl.constexpr, TILE: tl.constexpr):
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_used = columns < dim
    place = gate_up + row * 2 * dim + columns
    gate = tl.load(place, mask=is_used, other=0.0).to(tl.float32)
    up = tl.load(place + dim, mask=is_used, other=0.0).to(tl.float32)
    active = gelu_tanh(gate) if IS_GELU else silu(gate)
    result = (active * up).to(output.dtype.element_ty)
    tl.store(output + row * dim + columns, result, mask=is_used)


@triton.jit
def _clamped_silu_kernel(output, gate_up, dim, limit, TILE: tl.constexpr):
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_used = columns < dim
    place = gate_up + row * 2 * dim + columns
    active = silu(tl.load(place, mask=is_used, other=0.0).to(tl.float32))
    up = tl.load(place + dim, mask=is_used, other=0.0).to(tl.float32)
    active = tl.minimum(active, limit, propagate_nan=tl.PropagateNan.ALL)
    result = (active * clamp(up, -limit, limit)).to(output.dtype.element_ty)
    tl.store(output + row * dim + columns, result, mask=is_used)


@triton.jit
def _clamped_swiglu_kernel(output, gate_up, dim, alpha, limit, TILE: tl.constexpr):
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_used = columns < dim
    place = gate_up + row * 2 * dim + columns
    gate = tl.load(place, mask=is_used, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.load(place + dim, mask=is_used, other=0.0).to(tl.float32)
    up = clamp(up, -limit, limit)
    result = ((up + 1.0) * gate * sigmoid(alpha * gate)).to(output.dtype.element_ty)
    tl.store(output + row * dim + columns, result, mask=is_used)


@triton.jit
def _xielu_kernel(output, x, coefficients, dim, stride, TILE: tl.constexpr):
    """Near 0, ``expm1(x) - x`` is summed as a series: both are almost equal there."""
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_used = columns < dim
    value = tl.load(x + row * stride + columns, mask=is_used, other=0.0).to(tl.float32)
    least = tl.minimum(value, tl.load(coefficients + 3))
    near = tl.maximum(least, -0.5)
    series = near * (1.0 / 3628800.0) + 1.0 / 362880.0
    series = series * near + 1.0 / 40320.0
    series = series * near + 1.0 / 5040.0
    series = series * near + 1.0 / 720.0
    series = series * near + 1.0 / 120.0
    series = series * near + 1.0 / 24.0
    series = series * near + 1.0 / 6.0
    series = (series * near + 0.5) * near * near
    bent = tl.where(least > -0.5, series, tl.exp(least) - 1.0 - least) + (least - value)
    curve = tl.load(coefficients) * value * value
    curve = tl.where(value > 0.0, curve, tl.load(coefficients + 1) * bent)
    result = (curve + tl.load(coefficients + 2) * value).to(output.dtype.element_ty)
    tl.store(output + row * dim + columns, result, mask=is_used)

"""Norms, activations and rotations by ``native/layers.cpp``, ``activations.cpp`` and
``rope.cpp``; for the contract see ``kernels.reference``."""

from __future__ import annotations

import torch

from kernels.activations import ActivationKind
from kernels.cpu.bindings import ACTIVATION_CODES, DTYPE_CODES, GATING_CODES, function, pointer
from kernels.moe import GatedActivationKind


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ``kernels.reference.layers``."""
    if x.dim() != 2 or x.stride(1) != 1:  # strided rows are read in place
        x = x.contiguous()
    normed = x.new_empty(x.shape)
    dim = x.shape[-1]
    function("quire_rms_norm")(
        DTYPE_CODES[x.dtype],
        x.data_ptr(),
        x.stride(-2) if x.dim() == 2 else dim,
        weight.data_ptr(),
        weight.numel() // dim,
        x.numel() // dim,
        dim,
        eps,
        normed.data_ptr(),
    )
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See ``kernels.reference.fused``."""
    x = x.contiguous()
    normed = torch.empty_like(x)
    rows, dim = x.shape
    function("quire_add_rms_norm")(
        DTYPE_CODES[x.dtype],
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        rows,
        dim,
        eps,
        normed.data_ptr(),
    )
    return normed


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """See ``kernels.reference.layers``."""
    x = x.contiguous()
    normed = torch.empty_like(x)
    dim = x.shape[-1]
    function("quire_layer_norm")(
        *(DTYPE_CODES[x.dtype], x.data_ptr(), weight.data_ptr(), pointer(bias)),
        *(x.numel() // dim, dim, eps, normed.data_ptr()),
    )
    return normed


def activate(x: torch.Tensor, kind: ActivationKind) -> torch.Tensor:
    """See ``kernels.reference.layers``."""
    if x.stride(1) != 1:
        x = x.contiguous()
    active = x.new_empty(x.shape)
    function("quire_activate")(
        *(ACTIVATION_CODES[kind], DTYPE_CODES[x.dtype], x.data_ptr(), x.stride(0), *x.shape),
        active.data_ptr(),
    )
    return active


def xielu(x: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """See ``kernels.reference.layers``."""
    if x.stride(1) != 1:
        x = x.contiguous()
    active = x.new_empty(x.shape)
    function("quire_xielu")(
        *(DTYPE_CODES[x.dtype], coefficients.data_ptr(), x.data_ptr(), x.stride(0), *x.shape),
        active.data_ptr(),
    )
    return active


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """See ``kernels.reference.layers``."""
    function("quire_softcap")(x.data_ptr(), x.numel(), cap)
    return x


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``kernels.reference.layers``."""
    return _gate_mul(gate_up, "silu")


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``kernels.reference.fused``."""
    return _gate_mul(gate_up, "gelu_tanh")


def erf_gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``kernels.reference.fused``."""
    return _gate_mul(gate_up, "gelu")


def clamped_silu_mul(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """See ``kernels.reference.moe``."""
    return _gate_mul(gate_up, "clamped_silu", limit=limit)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """See ``kernels.reference.moe``."""
    return _gate_mul(gate_up, "clamped_swiglu", alpha, limit)


def _gate_mul(
    gate_up: torch.Tensor, kind: GatedActivationKind, alpha: float = 0.0, limit: float = 0.0
) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape
    product = gate_up.new_empty((rows, width // 2))
    function("quire_gate_mul")(
        DTYPE_CODES[gate_up.dtype],
        GATING_CODES[kind],
        alpha,
        limit,
        gate_up.data_ptr(),
        rows,
        width // 2,
        product.data_ptr(),
    )
    return product


def rope_tables(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.reference.layers``."""
    num_tokens, half = positions.numel(), inverse_frequencies.numel()
    cos = torch.empty((num_tokens, 1, half), dtype=torch.float32)
    sin = torch.empty((num_tokens, 1, half), dtype=torch.float32)
    function("quire_rope_tables")(
        positions.data_ptr(),
        inverse_frequencies.data_ptr(),
        scale,
        num_tokens,
        half,
        cos.data_ptr(),
        sin.data_ptr(),
    )
    return cos, sin


def attention_temperatures(
    positions: torch.Tensor, first: int, every: int, scale: float
) -> torch.Tensor:
    """See ``kernels.reference.layers``."""
    factors = torch.empty(positions.shape, dtype=torch.float32)
    sizes = first, every, scale, positions.numel()
    function("quire_temperatures")(positions.data_ptr(), *sizes, factors.data_ptr())
    return factors

"""The element-wise parts of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from kernels.activations import ActivationKind

_ACTIVATIONS: dict[ActivationKind, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square_(),
}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang & Sennrich 2019).

    Computed in float32, returned in x's dtype.

    Args:
        x: [..., dim].
        weight: [dim], or [heads, dim] if x is [..., heads, dim].
        eps: added to the mean square.
    """
    wide = x.float()
    # A single pass for the sum of squares: torch's own rms_norm makes several on a CPU.
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return (wide * inverse).mul_(weight).to(x.dtype)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dimension (Ba et al.
    2016): [..., dim], [dim] and [dim] or None -> [..., dim]."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def activate(x: torch.Tensor, kind: ActivationKind) -> torch.Tensor:
    """Apply an activation to each value: [n, d] -> [n, d]."""
    return _ACTIVATIONS[kind](x)


def xielu(x: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """xIELU (Huang & Schlag 2024) of each value: [n, d] -> [n, d], whose rows may be strided.

    ``a x^2 + b x`` where x > 0, and ``c (expm1(min(x, e)) - x) + b x`` elsewhere.

    Args:
        x: any dtype.
        coefficients: [4] float32: a, c, b and e, which is just below 0.
    """
    rising, falling, slope, edge = coefficients.to(torch.promote_types(x.dtype, torch.float32))
    wide = x.to(rising.dtype)
    below = (torch.expm1(torch.minimum(wide, edge)) - wide) * falling
    return torch.where(wide > 0, rising * wide * wide, below).add_(wide * slope).to(x.dtype)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """``cap * tanh(x / cap)`` in place (Gemma 2): [n, d] float32, contiguous."""
    return x.div_(cap).tanh_().mul_(cap)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of a fused projection (SwiGLU, Shazeer 2020): [n, 2 d] -> [n, d]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def rope_tables(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of a step's positions, times ``scale``: [n] -> two of [n, 1, dim /
    2].

    They are computed in each step and shared by its layers: a table for all positions of a long
    context would cost more in memory and startup than these few thousand values cost in time.
    """
    angles = torch.outer(positions.to(torch.float32), inverse_frequencies).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scale == 1.0 else (cos.mul_(scale), sin.mul_(scale))


def attention_temperatures(
    positions: torch.Tensor, first: int, every: int, scale: float
) -> torch.Tensor:
    """``1 + scale * log(1 + floor((p + first) / every))`` (Nakanishi 2025), the factor of
    queries at positions [n] int64: [n] float32."""
    periods = ((positions + first) // every).float()
    return 1.0 + scale * torch.log1p(periods)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021), with halves rotated in Hugging Face's layout.

    Args:
        x: [n, heads, head_dim].
        cos, sin: [n, 1, head_dim / 2] float32.

    Returns:
        x rotated, in its own dtype, contiguous.
    """
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)

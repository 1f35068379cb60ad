"""Rotary frequencies for a context length."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from engine.models.rope_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
)
from engine.models.spec import DecoderSpec


def inverse_frequencies(
    rope: RopeSpec, head_dim: int, trained_context: int, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """Return the angle per position of each pair of dimensions, and the factor on cos and sin.

    They are computed in float32 and in the order of Hugging Face's operations: at position 100,000
    a difference in the last place is visible, and checkpoints were trained with that code.

    Args:
        rope: base and scaling.
        head_dim: of the heads.
        trained_context: ``max_position_embeddings``.
        max_model_len: longest context served; it matters for scalings that depend on length.

    Returns:
        [head_dim / 2] float32 and the attention factor. Pairs of dimensions that are not rotated
            come
        last, with a frequency of 0.
    """
    turned = rope.num_dims or head_dim
    frequencies, factor = _frequencies(rope, turned, trained_context, max_model_len)
    if rope.clockwise:
        frequencies = -frequencies
    return functional.pad(frequencies, (0, (head_dim - turned) // 2)), factor


def rotary_order(spec: DecoderSpec) -> torch.Tensor | None:
    """Return the order of a head's dimensions in which the kernels rotate them: i against i + d /
    2.

    Scores are sums over the dimensions of queries and keys, so any common order will do. The loaded
    rows are permuted into this one, and the kernels need to support no other.

    Returns:
        [rope_head_dim] int64, the checkpoint's dimension at each place; None if they are in this
            order
        already.
    """
    if spec.rope is None:
        return None
    head_dim = spec.rope_head_dim
    turned = spec.rope.num_dims or head_dim
    if turned == head_dim and not spec.rope.interleaved:
        return None
    rotated, kept = torch.arange(turned), torch.arange(turned, head_dim)
    first, second = rotated.view(2, -1)
    if spec.rope.interleaved:
        first, second = rotated.view(-1, 2).T
    kept_first, kept_second = kept.view(2, -1)
    return torch.cat((first, kept_first, second, kept_second))


def _frequencies(
    rope: RopeSpec, head_dim: int, trained_context: int, max_model_len: int
) -> tuple[torch.Tensor, float]:
    scaling = rope.scaling
    if isinstance(scaling, DynamicScaling):
        base = _dynamic_base(rope.theta, scaling, head_dim, trained_context, max_model_len)
        return _plain(base, head_dim), 1.0
    plain = _plain(rope.theta, head_dim)
    if scaling is None:
        return plain, 1.0
    if isinstance(scaling, ProportionalScaling):
        plain[int(scaling.share * head_dim // 2) :] = 0.0
        return plain, 1.0
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor, 1.0
    if isinstance(scaling, Llama3Scaling):
        return _llama3(plain, scaling), 1.0
    if isinstance(scaling, YarnScaling):
        return _yarn(rope.theta, head_dim, scaling), scaling.attention_factor
    return _longrope(rope.theta, head_dim, scaling, max_model_len)


def _plain(theta: float, head_dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _dynamic_base(
    theta: float, scaling: DynamicScaling, head_dim: int, trained: int, served: int
) -> float:
    """``theta * (factor * length / trained - (factor - 1)) ^ (d / (d - 2))``."""
    stretch = scaling.factor * max(served, trained) / trained - (scaling.factor - 1)
    return theta * stretch ** (head_dim / max(head_dim - 2, 1))


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Divide frequencies with wavelengths above the low cut, keep those below the high one."""
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / scaling.factor + smooth * plain
    divided = torch.where(wavelength > original / low, plain / scaling.factor, plain)
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(medium, between, divided)


def _yarn(theta: float, head_dim: int, scaling: YarnScaling) -> torch.Tensor:
    """Keep the frequencies of dimensions that turn often, interpolate slow ones."""
    original = scaling.original_max_position_embeddings

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp must not divide by zero
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp_(0, 1)
    base = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return 1.0 / (scaling.factor * base) * (1 - kept) + 1.0 / base * kept


def _longrope(
    theta: float, head_dim: int, scaling: LongRopeScaling, max_model_len: int
) -> tuple[torch.Tensor, float]:
    is_long = max_model_len > scaling.original_max_position_embeddings
    scale = scaling.attention_factor
    if is_long and scaling.long_attention_factor is not None:
        scale = scaling.long_attention_factor
    factors = torch.tensor(scaling.long_factor if is_long else scaling.short_factor)
    base = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return 1.0 / (factors * base), scale

"""Shared parts of the checks at start: run kernel and reference, and compare them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from kernels.attention import LayerAttention, LayerCache
from kernels.reference.cache_quantisation import decode_cache
from kernels.select import NoKernelsError

# Relative to the norm of a result. A reference rounds in other places, but not at random.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")
Pairs = Iterator[tuple[Any, Any]]  # actual and expected: tensors, or tuples of them

# Different numbers each time: memory that a broken kernel leaves unwritten must not hold the
# correct ones from an earlier check.
_SEEDS = itertools.count()


def new_generator() -> torch.Generator:
    """Return a random generator for one check."""
    return torch.Generator().manual_seed(next(_SEEDS))


def failure_reason(what: str, pairs: Callable[[], Pairs], tolerance: float) -> str | None:
    """Return why a kind of kernels is incorrect, or None.

    Raises:
        NoKernelsError: they have cost this process its GPU, so that nothing else can run either.
    """
    try:
        with torch.inference_mode():
            worst = max((_error(*pair) for pair in pairs()), default=0.0)
    # The compiler or the driver may raise anything; the reference kernels can still serve.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        _check_device(what, reason)
        return f"its {what} cannot run on this device: {reason}"
    if not worst <= tolerance:
        return f"its {what} is wrong on this device (relative error {worst:.1e})"
    return None


def _check_device(what: str, told: str) -> None:
    """Raise NoKernelsError if an error such as a wrong address has ended the device's context.

    Whatever is tried instead would fail with the same error, and be blamed for it.
    """
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        raise NoKernelsError(
            f"the GPU was lost in the check of triton's {what}: {told} (a fault of a kernel or of "
            "the driver; CUDA_LAUNCH_BLOCKING=1 tells which launch)"
        ) from None


def _error(actual: Any, expected: Any) -> float:
    """Return a tensor's largest relative error; infinite if integers or broken values differ."""
    if isinstance(expected, LayerCache):
        actual, expected = decode_cache(actual), decode_cache(expected)
    if isinstance(expected, tuple):
        return max((_error(*pair) for pair in zip(actual, expected, strict=True)), default=0.0)
    if not isinstance(expected, torch.Tensor):
        return 0.0
    actual = actual.cpu()
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else float("inf")
    if not torch.equal(actual.isnan(), expected.isnan()):
        return float("inf")
    actual, expected = actual.double().nan_to_num(), expected.double().nan_to_num()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-6))


def copy_to(value: Any, device: torch.device) -> Any:
    """Copy a tensor, or a tuple or layer with tensors, to a device."""
    if isinstance(value, torch.Tensor):
        return value.clone().to(device)
    if isinstance(value, LayerAttention):
        return replace(value, sinks=copy_to(value.sinks, device))
    if isinstance(value, tuple):
        parts = [copy_to(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def normal(random: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return normally distributed numbers, on the CPU."""
    return torch.randn(shape, generator=random).to(dtype)

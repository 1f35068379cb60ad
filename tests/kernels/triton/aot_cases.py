"""Launches in the shapes of real models, on ``meta`` tensors: nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.attention import LayerAttention, LayerCache
from kernels.triton.decode import decode_attention, plan_decode
from kernels.triton.prefill import PrefillPlan, prefill_attention

META = torch.device("meta")
BF16 = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def ints(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def decode(
    heads: int, kv_heads: int, dim: int, block: int, window: int | None, cap: float | None
) -> None:
    plan = plan_decode(ints(256), ints(256), ints(256, 64), window, 1024)
    cache = LayerCache(empty(20000, kv_heads, block, dim), empty(20000, kv_heads, block, dim))
    query, output = empty(256, heads, dim), empty(256, heads, dim)
    decode_attention(plan, LayerAttention(0.1, window, cap), query, cache, output)


def prefill(
    heads: int, kv_heads: int, dim: int, block: int, window: int | None, cap: float | None
) -> None:
    plan = PrefillPlan(ints(64), ints(64), ints(8), ints(8), ints(8), ints(8, 64))
    cache = LayerCache(empty(20000, kv_heads, block, dim), empty(20000, kv_heads, block, dim))
    query, output = empty(8192, heads, dim), empty(8192, heads, dim)
    prefill_attention(plan, LayerAttention(0.1, window, cap), query, cache, output)


# name: (heads, KV heads, head size, block size, window, cap)
_SHAPES: dict[str, tuple[int, int, int, int, int | None, float | None]] = {
    "llama-8b": (32, 8, 128, 64, None, None),
    "qwen3-0.6b": (16, 8, 128, 16, None, None),
    "qwen2-0.5b": (14, 2, 64, 64, None, None),
    "mistral-7b-window": (32, 8, 128, 64, 4096, None),
    "gemma2-9b": (16, 8, 256, 64, 4096, 50.0),
}

CASES: dict[str, Callable[[], object]] = {
    **{f"decode-{name}": partial(decode, *shape) for name, shape in _SHAPES.items()},
    **{f"prefill-{name}": partial(prefill, *shape) for name, shape in _SHAPES.items()},
}

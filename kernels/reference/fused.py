"""Parts of a decoder layer that fused kernels compute in one: the reference for those kernels."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.attention import LayerCache
from kernels.reference.kv_store import cache_rows, store_kv
from kernels.reference.layers import rms_norm, rope


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """``residual += x``, in place; returns the RMS norm of the sum (Zhang & Sennrich 2019).

    Args:
        x, residual: [n, dim].
        weight: [dim].
        eps: added to the mean square.
    """
    residual += x
    return rms_norm(residual, weight, eps)


def norm_rope(
    query: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Norm and rotate the queries of a layer that stores no keys.

    Args:
        query: [n, num_heads, head_dim].
        norm_weight: [1 or num_heads, head_dim], or None; eps, rotation: see ``norm_rope_store``.

    Returns:
        [n, num_heads, head_dim] contiguous.
    """
    if norm_weight is not None:
        query = rms_norm(query, norm_weight, eps)
    return query.contiguous() if rotation is None else rope(query, *rotation)


def norm_rope_store(
    fused: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    cache: LayerCache,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Norm and rotate queries and keys of a fused projection; store keys and values in their slots.

    Args:
        fused: [n, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values.
        norm_weight: [num_heads + num_kv_heads, head_dim] of the RMS norm of each head's query and
            key (Qwen3), or None for a model without.
        eps: of that norm.
        rotation: cosines and sines, [n, 1, head_dim / 2] float32 each, of the rotary embedding (Su
            et al. 2021), or None for a layer without.
        cache: the layer's blocks, updated in place.
        slot_mapping: [n] int64, ``block * block_size + offset``; -1: a padding token, not stored.

    Returns:
        [n, num_heads, head_dim] contiguous.
    """
    num_kv_heads, block_size = cache.keys.shape[1:3]
    query_key, values = fused[:, :-num_kv_heads], fused[:, -num_kv_heads:]
    if norm_weight is not None:
        query_key = rms_norm(query_key, norm_weight, eps)
    if rotation is not None:
        query_key = rope(query_key, *rotation)
    is_stored = slot_mapping >= 0
    rows = cache_rows(slot_mapping[is_stored], num_kv_heads, block_size)
    store_kv(query_key[is_stored, -num_kv_heads:], values[is_stored], cache, rows)
    return query_key[:, :-num_kv_heads].contiguous()


def latent_rope_store(
    query: torch.Tensor,
    latent: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor],
    cache: LayerCache,
    slot_mapping: torch.Tensor,
) -> None:
    """Rotate the queries of latent attention (DeepSeek-AI 2024); store latents in their slots.

    Args:
        query: [n, num_heads, rank + rope_dim], the last rope_dim of each head rotated in place.
        latent: [n, rank + rope_dim]: the part to norm, and the part of the key to rotate.
        norm_weight: [rank] of the RMS norm.
        eps: of that norm.
        rotation: cosines and sines, [n, 1, rope_dim / 2] float32 each.
        cache: the layer's blocks, updated in place; one KV head.
        slot_mapping: [n] int64, ``block * block_size + offset``; -1: a padding token, not stored.
    """
    rank = norm_weight.shape[0]
    query[..., rank:] = rope(query[..., rank:], *rotation)
    normed = rms_norm(latent[:, :rank], norm_weight, eps)
    turned = rope(latent[:, None, rank:], *rotation).squeeze(1)
    is_stored = slot_mapping >= 0
    keys = torch.cat((normed, turned), dim=-1)[is_stored]
    cache.keys.view(-1, keys.shape[-1]).index_copy_(0, slot_mapping[is_stored], keys)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` with tanh GELU (Gemma): [n, 2 d] -> [n, d]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def erf_gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` with exact (erf) GELU: [n, 2 d] -> [n, d]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate).mul_(up)

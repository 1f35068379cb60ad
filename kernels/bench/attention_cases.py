"""Cases of paged attention, compared with torch's attention over contiguous keys and values."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from kernels.attention import (
    AttentionSpec,
    BatchGeometry,
    LayerAttention,
    LayerCache,
    NewTokens,
)
from kernels.bench.case import Case
from kernels.triton.backend import TritonAttention
from kernels.triton.kv_store import norm_rope_store


def attention_case(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rows: int,
    queries: int,
    past: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    invariant: bool = False,
) -> Case:
    """``rows`` sequences of ``past`` + ``queries`` tokens in scattered blocks."""
    seq_len = past + queries
    blocks = -(-seq_len // block_size)
    places = np.random.default_rng(0).permutation(rows * blocks).reshape(rows, blocks)
    geometry = BatchGeometry.of(
        np.arange(rows + 1) * queries, np.full(rows, seq_len), places, device
    )
    spec = AttentionSpec(heads, kv_heads, head_dim, block_size, dtype, device)
    layer = LayerAttention(head_dim**-0.5)
    shape = (rows * blocks, kv_heads, block_size, head_dim)
    cache = LayerCache(*(torch.randn(shape, dtype=dtype, device=device) for _ in range(2)))
    query = torch.randn(rows * queries, heads, head_dim, dtype=dtype, device=device)
    backend = TritonAttention(invariant=invariant)
    state = backend.plan(geometry, spec)

    # The same keys and values in the peer's layout: [rows, kv_heads, seq_len, head_dim].
    table = torch.from_numpy(places).to(device)
    keys, values = (
        stored[table].transpose(1, 2).reshape(rows, kv_heads, -1, head_dim)[:, :, :seq_len]
        for stored in cache.tensors()
    )
    keys, values = keys.contiguous(), values.contiguous()
    batched = query.view(rows, queries, heads, head_dim).transpose(1, 2)
    mask = None
    if past and queries > 1:
        mask = torch.ones(queries, seq_len, dtype=torch.bool, device=device).tril(past)

    def torch_sdpa() -> torch.Tensor:
        attended = functional.scaled_dot_product_attention(
            batched,
            keys,
            values,
            attn_mask=mask,
            is_causal=queries > 1 and not past,
            enable_gqa=heads != kv_heads,
        )
        return attended.transpose(1, 2).reshape(query.shape)

    seen = queries * past + queries * (queries + 1) / 2
    return Case(
        name,
        run=lambda: backend.forward(state, layer, query, cache),
        peers={"torch sdpa": torch_sdpa},
        bytes_moved=(2 * keys.numel() + 2 * query.numel()) * dtype.itemsize,
        flops=4.0 * rows * heads * head_dim * seen,
    )


def new_tokens_case(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rows: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
) -> Case:
    """A decode step's attention that also norms, rotates and stores; and as two kernels."""
    blocks = -(-context // block_size)
    places = np.random.default_rng(0).permutation(rows * blocks).reshape(rows, blocks)
    lengths = np.full(rows, context)
    geometry = BatchGeometry.of(np.arange(rows + 1), lengths, places, device)
    spec = AttentionSpec(heads, kv_heads, head_dim, block_size, dtype, device)
    layer = LayerAttention(head_dim**-0.5)
    shape = (rows * blocks, kv_heads, block_size, head_dim)
    cache = LayerCache(*(torch.randn(shape, dtype=dtype, device=device) for _ in range(2)))
    angles = torch.rand(rows, 1, head_dim // 2, device=device) * 1000
    slots = places[:, -1] * block_size + (context - 1) % block_size
    tokens = NewTokens(
        torch.randn(rows, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device),
        torch.randn(heads + kv_heads, head_dim, dtype=dtype, device=device),
        1e-6,
        (angles.cos(), angles.sin()),
        torch.from_numpy(slots).to(device),
    )
    backend = TritonAttention()
    state = backend.plan(geometry, spec)

    def ours() -> torch.Tensor:
        attended = backend.store_and_attend(state, layer, tokens, cache)
        assert attended is not None, "too many rows"
        return attended

    def one_after_the_other() -> torch.Tensor:
        projected, weight, eps, rotation, slots = tokens
        query = norm_rope_store(projected, weight, eps, rotation, cache, slots)
        return backend.forward(state, layer, query, cache)

    return Case(
        name,
        run=ours,
        peers={"two kernels": one_after_the_other},
        bytes_moved=(2 * rows * context * kv_heads * head_dim + 2 * tokens.projected.numel())
        * dtype.itemsize,
    )

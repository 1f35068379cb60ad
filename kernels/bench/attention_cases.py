"""Cases of paged attention, compared with torch's attention over contiguous keys and values.

And with FlashInfer's over the same blocks, where that is installed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

from kernels.attention import (
    AttentionSpec,
    BatchGeometry,
    LayerAttention,
    LayerCache,
)
from kernels.bench.case import Case
from kernels.bench.flashinfer_peer import flashinfer_attention
from kernels.triton.backend import TritonAttention


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

    peers: dict[str, Callable[[], torch.Tensor]] = {"torch sdpa": torch_sdpa}
    if (peer := flashinfer_attention(geometry, query, cache, layer.scale)) is not None:
        peers["flashinfer"] = peer
    seen = queries * past + queries * (queries + 1) / 2
    return Case(
        name,
        run=lambda: backend.forward(state, layer, query, cache),
        peers=peers,
        bytes_moved=(2 * keys.numel() + 2 * query.numel()) * dtype.itemsize,
        flops=4.0 * rows * heads * head_dim * seen,
    )

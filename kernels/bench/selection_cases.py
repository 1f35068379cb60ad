"""Cases of attention to selected positions: an indexer's scores, the selection, and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from kernels.attention import (
    AttentionSpec,
    BatchGeometry,
    LayerAttention,
    LayerCache,
    SelectionSpec,
)
from kernels.bench.case import Case, ReferenceCase
from kernels.select import select_kernels
from kernels.sparse import IndexQuery, SelectingAttention


class _Sides(NamedTuple):
    ours: Callable[[], torch.Tensor]
    reference: Callable[[], torch.Tensor]
    bytes_moved: float
    flops: float


def selection_case(
    name: str, device: torch.device, dtype: torch.dtype, *, kernels: str = "triton", **shape: int
) -> Case:
    """One layer of ``rows`` sequences; for the rest of ``shape`` see ``_sides``."""
    ours, reference, num_bytes, flops = _sides(kernels, device, dtype, **shape)
    # The reference reads lengths on the host.
    peers = {"reference": reference}
    return Case(name, ours, peers, num_bytes, flops, peers_synchronise=True)


def selection_on_cpu(name: str, dtype: torch.dtype, **shape: int) -> ReferenceCase:
    """The same by the CPU's kernels."""
    return ReferenceCase(name, *_sides("cpu", torch.device("cpu"), dtype, **shape))


def _sides(
    kernels: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rows: int,
    queries: int,
    past: int,
    top_k: int,
    heads: int,
    rank: int,
    rope_dim: int,
    index_heads: int,
    index_dim: int,
    block_size: int,
) -> _Sides:
    seq_len, total = past + queries, rows * queries
    blocks = -(-seq_len // block_size)
    places = np.random.default_rng(0).permutation(rows * blocks).reshape(rows, blocks)
    starts, seq_lens = np.arange(rows + 1) * queries, np.full(rows, seq_len)
    geometry = BatchGeometry.of(starts, seq_lens, places, device)
    spec = AttentionSpec(
        *(heads, 1, rank + rope_dim, block_size, dtype, device),
        value_dim=rank,
        selection=SelectionSpec(top_k, index_heads, index_dim),
    )

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    keys = numbers(rows * blocks, 1, block_size, rank + rope_dim)
    index_keys = numbers(rows * blocks, 1, block_size, index_dim)
    cache = LayerCache(keys, keys[..., :rank], index_keys=index_keys)
    weights = torch.randn(total, index_heads, device=device)
    index = IndexQuery(numbers(total, index_heads, index_dim), weights)
    query, layer = numbers(total, heads, rank + rope_dim), LayerAttention((rank + rope_dim) ** -0.5)

    def run_by(kind: str) -> Callable[[], torch.Tensor]:
        attention = select_kernels(kind, spec)[0].attention
        assert isinstance(attention, SelectingAttention)
        state = attention.plan(geometry, spec)

        def run() -> torch.Tensor:
            if attention.selects(state):
                attention.select(state, index, index_keys)
            return attention.forward(state, layer, query, cache)

        return run

    seen = queries * past + queries * (queries + 1) / 2
    read = index_keys.numel() + total * top_k * (rank + rope_dim) + 2 * query.numel()
    scored = 2.0 * rows * seen * index_heads * index_dim
    attended = 2.0 * total * min(top_k, seq_len) * heads * (2 * rank + rope_dim)
    return _Sides(run_by(kernels), run_by("reference"), read * dtype.itemsize, scored + attended)

"""Chunked attention equals attention with the defining mask, on each backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import (
    AttentionBackend,
    AttentionSpec,
    BatchGeometry,
    LayerAttention,
    LayerCache,
)
from kernels.chunked import ChunkedAttention
from kernels.cpu.linear import is_available
from kernels.reference.attention import ReferenceAttention

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 4

BACKENDS: list[AttentionBackend] = [ChunkedAttention(ReferenceAttention())]
if is_available():
    from kernels.cpu.backend import CpuAttention

    BACKENDS.append(CpuAttention())  # which supports chunks directly


def spec_of(chunk: int) -> AttentionSpec:
    return AttentionSpec(
        *(HEADS, KV_HEADS, DIM, BLOCK, torch.float32, torch.device("cpu")), chunk_size=chunk
    )


def masked(query, keys, values, chunk: int | None) -> torch.Tensor:
    """A sequence's last queries with the mask, [n, heads, dim] over [length, kv_heads, dim]."""
    length, count = keys.shape[0], query.shape[0]
    places, slots = torch.arange(length - count, length)[:, None], torch.arange(length)
    seen = slots <= places
    if chunk is not None:
        seen &= slots // chunk == places // chunk
    group = HEADS // KV_HEADS
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * DIM**-0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


ROW = st.tuples(st.integers(1, 70), st.integers(1, 40) | st.just(1))


@pytest.mark.parametrize("attention", BACKENDS, ids=lambda attention: attention.name)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(ROW, min_size=1, max_size=5)
    | st.lists(st.tuples(st.integers(1, 70), st.just(1)), min_size=1),
    blocks_a_chunk=st.integers(1, 6),
    seed=st.integers(0, 2**16),
)
def test_chunks_equal_their_mask(attention, rows, blocks_a_chunk, seed):
    rows = [(length, min(count, length)) for length, count in rows]
    chunk, random = blocks_a_chunk * BLOCK, torch.Generator().manual_seed(seed)
    lengths = np.array([length for length, _ in rows])
    starts = np.concatenate(([0], np.cumsum([count for _, count in rows])))
    blocks = -(-lengths // BLOCK)
    places = torch.randperm(int(blocks.sum()), generator=random).numpy()
    tables = np.zeros((len(rows), int(blocks.max())), np.int32)
    shape = (len(places), KV_HEADS, BLOCK, DIM)
    cache = LayerCache(*torch.randn(2, *shape, generator=random))
    query = torch.randn(int(starts[-1]), HEADS, DIM, generator=random)
    own = []
    for row, end in enumerate(np.cumsum(blocks)):
        held = places[end - blocks[row] : end]
        tables[row, : blocks[row]] = held
        own.append([x[held].transpose(1, 2).flatten(0, 1)[: lengths[row]] for x in cache[:2]])
    spec = spec_of(chunk)
    state = attention.plan(BatchGeometry.of(starts, lengths, tables, spec.device), spec)
    for layer in (LayerAttention(DIM**-0.5, chunk_size=chunk), LayerAttention(DIM**-0.5)):
        actual = attention.forward(state, layer, query, cache)
        for row, (keys, values) in enumerate(own):
            part = slice(starts[row], starts[row + 1])
            expected = masked(query[part], keys, values, layer.chunk_size)
            torch.testing.assert_close(actual[part], expected, atol=2e-5, rtol=1e-4)


def test_chunks_that_cut_a_block_are_refused():
    reason = ChunkedAttention(ReferenceAttention()).refuse(spec_of(10))
    assert reason is not None
    assert "10 tokens are not made of blocks of 4" in reason

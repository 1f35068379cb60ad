"""Paged attention, compared with a plain float64 loop on random ragged batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import AttentionSpec, BatchGeometry, LayerAttention, LayerCache
from kernels.reference import attention as module
from kernels.reference.attention import ReferenceAttention
from kernels.reference.kv_store import cache_rows, copy_blocks, store_kv
from tests.kernels.triton_kernels.interpreted.oracle import attend, make_problem

CPU = torch.device("cpu")


def _naive(query, keys, values, layer, start):
    """One sequence in float64: query [n, H, D] at positions start.., keys [L, Hkv, D]."""
    group = query.shape[1] // keys.shape[1]
    output = torch.zeros_like(query, dtype=torch.float64)
    for i in range(query.shape[0]):
        position = start + i
        first = 0 if layer.window is None else max(0, position - layer.window + 1)
        for head in range(query.shape[1]):
            k = keys[first : position + 1, head // group].double()
            scores = (k @ query[i, head].double()) * layer.scale
            if layer.slopes is not None:
                distances = torch.arange(first, position + 1) - position
                scores += layer.slopes[head].double() * distances
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            if layer.sinks is not None:
                scores = torch.cat((scores, layer.sinks[head : head + 1].double()))
            weights = torch.softmax(scores, dim=0)[: k.shape[0]]
            output[i, head] = weights @ values[first : position + 1, head // group].double()
    return output


def _check(
    rows,
    *,
    kv_heads,
    group,
    head_dim,
    block_size,
    window,
    softcap,
    dtype,
    seed,
    has_sinks=False,
    has_slopes=False,
):
    """rows: (context before this step, new tokens) of each sequence."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    spec = AttentionSpec(
        *(kv_heads * group, kv_heads, head_dim, block_size, dtype, CPU, (window,), softcap),
        has_slopes=has_slopes,
    )
    sinks = noise(kv_heads * group).float() if has_sinks else None
    slopes = torch.linspace(0, 0.5, kv_heads * group) if has_slopes else None
    layer = LayerAttention(head_dim**-0.5, window, softcap, sinks, slopes=slopes)
    lens = np.array([start + new for start, new in rows])
    num_blocks = -(-lens // block_size)
    total = int(num_blocks.sum()) + 3
    # Unwritten slots are poisoned; block 0 belongs to no row.
    cache = LayerCache(
        *(torch.full((total, kv_heads, block_size, head_dim), math.nan).to(dtype) for _ in "kv")
    )
    free = rng.permutation(np.arange(1, total)).tolist()
    tables = np.zeros((len(rows), int(num_blocks.max())), np.int64)
    keys, values, queries = [], [], []
    for i, (_start, new) in enumerate(rows):
        tables[i, : num_blocks[i]] = [free.pop() for _ in range(num_blocks[i])]
        k, v = noise(lens[i], kv_heads, head_dim), noise(lens[i], kv_heads, head_dim)
        positions = np.arange(lens[i])
        slots = tables[i, positions // block_size] * block_size + positions % block_size
        store_kv(k, v, cache, cache_rows(torch.from_numpy(slots), kv_heads, block_size))
        keys.append(k)
        values.append(v)
        queries.append(noise(new, kv_heads * group, head_dim))
    query_start = np.cumsum([0, *(new for _, new in rows)])
    backend = ReferenceAttention()
    state = backend.plan(BatchGeometry.of(query_start, lens, tables, CPU), spec)
    output = backend.forward(state, layer, torch.cat(queries), cache)
    assert output.dtype == dtype
    expected = torch.cat(
        [_naive(queries[i], keys[i], values[i], layer, start) for i, (start, _) in enumerate(rows)]
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)


_ROW = st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 20)))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(_ROW, min_size=1, max_size=7),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 4]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, None, 1, 5, 16]),
    softcap=st.sampled_from([None, 3.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
    has_sinks=st.booleans(),
    has_slopes=st.booleans(),
)
def test_any_ragged_batch_equals_the_naive_loop(
    rows, kv_heads, group, block_size, window, softcap, dtype, seed, has_sinks, has_slopes
):
    _check(
        rows,
        kv_heads=kv_heads,
        group=group,
        head_dim=8,
        block_size=block_size,
        window=window,
        softcap=softcap,
        dtype=dtype,
        seed=seed,
        has_sinks=has_sinks,
        has_slopes=has_slopes,
    )


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_queries_that_look_ahead_equal_the_definition(window, softcap):
    for seed in range(5):
        problem = make_problem(
            [30, 1, 13],
            [0, 40, 21],
            window=window,
            softcap=softcap,
            is_bidirectional=True,
            seed=seed,
        )
        backend = ReferenceAttention()
        state = backend.plan(problem.geometry, problem.spec)
        found = backend.forward(state, problem.layer, problem.query, problem.cache)
        torch.testing.assert_close(found.double(), attend(problem), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("waste", "size"), [(0, 2**20), (10**9, 2**20), (10**9, 1)])
def test_buckets_change_nothing(monkeypatch, waste, size):
    """A bucket for each length, a single one for all, and one for each row."""
    monkeypatch.setattr(module, "_BUCKET_WASTE_SLOTS", waste)
    monkeypatch.setattr(module, "_BUCKET_BYTES", {"cpu": size})
    rows = [(3, 1), (70, 1), (71, 1), (0, 1), (20, 5), (33, 1), (0, 9)]
    for window in (None, 10):
        _check(
            rows,
            kv_heads=2,
            group=2,
            head_dim=8,
            block_size=4,
            window=window,
            softcap=None,
            dtype=torch.float32,
            seed=5,
        )


def test_copied_blocks_are_equal_and_the_others_untouched():
    cache = LayerCache(*(torch.randn(6, 2, 4, 8) for _ in "kv"))
    before = [part.clone() for part in cache.tensors()]
    copy_blocks(cache, torch.tensor([1, 1]), torch.tensor([4, 0]))
    for part, old in zip(cache.tensors(), before, strict=True):
        assert torch.equal(part[4], old[1])
        assert torch.equal(part[0], old[1])
        assert torch.equal(part[[1, 2, 3, 5]], old[[1, 2, 3, 5]])


def test_heads_that_do_not_divide_are_refused():
    spec = AttentionSpec(5, 2, 8, 16, torch.float32, CPU)
    assert "5 heads" in (ReferenceAttention().refuse(spec) or "")

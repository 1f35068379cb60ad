"""Attention of encoders: each query sees all keys of its window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dense
from kernels.cpu.native import build


@given(
    windows=st.integers(1, 4),
    queries=st.integers(1, 150),
    length=st.integers(1, 200),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 12, 16, 72, 80]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([None, 0.7]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=80, deadline=None)
def test_windows_equal_the_definition(
    windows, queries, length, heads, head_dim, dtype, scale, seed
):
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(windows, queries, heads, head_dim, generator=random).to(dtype)
    keys, values = torch.randn(2, windows, heads, length, head_dim, generator=random).to(dtype)
    scores = torch.einsum("wqhd,whkd->whqk", query.double(), keys.double())
    scores *= head_dim**-0.5 if scale is None else scale
    expected = torch.einsum("whqk,whkd->wqhd", scores.softmax(-1), values.double())
    found = dense.attend(query, keys, values, scale)
    assert (found.shape, found.dtype) == (query.shape, dtype)
    error = (found.double() - expected).norm() / expected.norm()
    assert error < (5e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.skipif(build.load() is None, reason="no native kernels here")
def test_a_query_has_the_same_bits_whatever_is_beside_it(monkeypatch):
    """Images are embedded in pieces, whose number must not matter."""
    query = torch.randn(1, 90, 2, 16, dtype=torch.bfloat16)
    keys, values = torch.randn(2, 1, 2, 90, 16, dtype=torch.bfloat16)
    whole = dense.attend(query, keys, values)
    parts = [dense.attend(part.contiguous(), keys, values) for part in query.split(32, dim=1)]
    assert torch.equal(torch.cat(parts, dim=1), whole)

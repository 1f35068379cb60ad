"""Checks of attention to a source and to the text behind it, over plain tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from kernels.attention import (
    AttentionSpec,
    BatchGeometry,
    LayerAttention,
    LayerCache,
    SourcePlaces,
)
from kernels.operations import Kernels
from kernels.select import select_kernels

CPU = torch.device("cpu")
POSITIONS, PLACES, BLOCK, HEADS, DIM = 21, 32, 16, 2, 16


# Tokens of this step and in all, of each row.
BATCHES = (
    ((1, 33), (1, 40), (1, 90)),  # texts, one token each
    ((32, 32), (7, 20), (1, 4)),  # sources alone
    ((45, 45), (1, 37), (5, 36), (9, 30), (1, 32)),  # both, also in one row
)


def kernels_of(name: str) -> tuple[Kernels, AttentionSpec]:
    spec = AttentionSpec(
        *(HEADS, HEADS, DIM, BLOCK, torch.float32, CPU), source=SourcePlaces(POSITIONS, PLACES)
    )
    return select_kernels(name, spec)[0], spec


def dense(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One token's attention to all keys: [heads, dim]."""
    scores = torch.einsum("hd,nhd->hn", query, keys) / math.sqrt(DIM)
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), values)


def check_attention(name: str, rows: tuple[tuple[int, int], ...]) -> None:
    """Check both attentions of a step with these rows."""
    kernels, spec = kernels_of(name)
    torch.manual_seed(0)
    width, rng = 6, np.random.default_rng(1)
    # The table has a spare line, as the runner's.
    tables = rng.permutation((len(rows) + 1) * width).reshape(-1, width)
    shape = (tables.size, HEADS, BLOCK, DIM)
    cache = LayerCache(torch.randn(shape), torch.randn(shape))
    counts, lens = (np.array(each) for each in zip(*rows, strict=True))
    starts = np.append(0, counts.cumsum())
    geometry = BatchGeometry.of(starts, lens, tables, CPU)
    plan: Any = kernels.attention.plan(geometry, spec)
    texts, wanted = [], []
    for line, (count, length) in enumerate(rows):
        places = (
            torch.from_numpy(tables[line]).repeat_interleave(BLOCK),
            torch.arange(width * BLOCK),
        )
        keys, values = (each[places[0], :, places[1] % BLOCK] for each in cache[:2])
        for position in range(length - count, length):
            if position >= PLACES:
                texts.append(int(starts[line]) + position - length + count)
                wanted.append((keys, values, position + 1))
    indices = plan.text_indices
    assert (list(range(int(starts[-1]))) if indices is None else indices.tolist()) == texts
    if not texts:
        return
    query = torch.randn(len(texts), HEADS, DIM)
    scale = DIM**-0.5
    to_text, to_source = (
        kernels.attention.forward(plan, LayerAttention(scale, reads_source=cross), query, cache)
        for cross in (False, True)
    )
    for token, (keys, values, end) in enumerate(wanted):
        own = dense(query[token], keys[PLACES:end], values[PLACES:end])
        torch.testing.assert_close(to_text[token], own, atol=1e-5, rtol=1e-5)
        source = dense(query[token], keys[:POSITIONS], values[:POSITIONS])
        torch.testing.assert_close(to_source[token], source, atol=1e-5, rtol=1e-5)


def check_places(name: str) -> None:
    """Check counting from a later place on."""
    for dtype in (torch.int32, torch.int64):
        values = torch.tensor([0, -1, 31, 32, 33, 90], dtype=dtype)
        found = kernels_of(name)[0].operations.places_behind(values, 32)
        assert found.dtype == dtype
        assert found.tolist() == [0, 0, 0, 0, 1, 58]

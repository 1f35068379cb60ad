"""Batches whose queries attend to selections, and the definition of what each one attends to."""

from __future__ import annotations

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
from kernels.sparse import IndexQuery

RANK, ROPE, SCALE = 32, 8, 0.3


class Problem(NamedTuple):
    """Attention of some rows; what lies in the cache behind a row's end is not finite."""

    spec: AttentionSpec
    geometry: BatchGeometry
    index: IndexQuery
    query: torch.Tensor  # [tokens, heads, RANK + ROPE]
    cache: LayerCache
    ends: list[int]  # the number of positions of each token
    rows: list[int]  # the row of each token


def make_problem(
    queries: list[int],
    past: list[int],
    *,
    top_k: int,
    heads: int = 5,
    index_heads: int = 6,
    index_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    rounded: bool = False,
    seed: int = 0,
) -> Problem:
    """Make rows with so many queries after so many tokens.

    ``rounded``: index keys and queries are small whole numbers, so that many scores are equal, and
    exact in any order of summation.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    def index_numbers(*shape: int) -> torch.Tensor:
        return normal(*shape).round() if rounded else normal(*shape)

    seq_lens = np.array(queries) + np.array(past)
    blocks = -(-seq_lens // block_size)
    num_blocks = int(blocks.sum()) + 3
    order = torch.randperm(num_blocks, generator=random).numpy()
    tables = np.zeros((len(queries), int(blocks.max())), np.int32)
    keys = torch.full((num_blocks, 1, block_size, RANK + ROPE), float("nan"))
    index_keys = torch.full((num_blocks, 1, block_size, index_dim), float("nan"))
    begin = 0
    for row, (count, length) in enumerate(zip(blocks, seq_lens, strict=True)):
        tables[row, :count] = order[begin : begin + count]
        begin += count
        slots = _slots(tables[row], int(length), block_size)
        keys.view(-1, RANK + ROPE)[slots] = normal(int(length), RANK + ROPE)
        index_keys.view(-1, index_dim)[slots] = index_numbers(int(length), index_dim)
    total, device = sum(queries), torch.device("cpu")
    keys, index_keys = keys.to(dtype), index_keys.to(dtype)
    spec = AttentionSpec(
        *(heads, 1, RANK + ROPE, block_size, dtype, device),
        value_dim=RANK,
        selection=SelectionSpec(top_k, index_heads, index_dim),
    )
    query_start = np.append(0, np.cumsum(queries))
    return Problem(
        spec,
        BatchGeometry.of(query_start, seq_lens, tables, device),
        IndexQuery(
            index_numbers(total, index_heads, index_dim).to(dtype),
            index_numbers(total, index_heads),
        ),
        normal(total, heads, RANK + ROPE).to(dtype),
        LayerCache(keys, keys[..., :RANK], index_keys=index_keys),
        [p + 1 + i for count, p in zip(queries, past, strict=True) for i in range(count)],
        [row for row, count in enumerate(queries) for _ in range(count)],
    )


def layer() -> LayerAttention:
    """The layer of all problems."""
    return LayerAttention(SCALE)


def selected(problem: Problem, token: int) -> list[int]:
    """The slots that a token attends to, by a plain sort of (score, position)."""
    end, top_k = problem.ends[token], problem.spec.selection.top_k
    table = problem.geometry.tables[problem.rows[token]]
    slots = _slots(table, end, problem.spec.block_size)
    index_keys = problem.cache.index_keys.view(-1, problem.cache.index_keys.shape[-1])
    keys, query = index_keys[slots].double(), problem.index.query[token].double()
    scores = problem.index.weights[token].double() @ torch.relu(query @ keys.T)
    order = sorted(range(end), key=lambda p: (-float(scores[p]), p))
    return [int(slots[p]) for p in sorted(order[:top_k])]


def attend(problem: Problem) -> torch.Tensor:
    """[tokens, heads, RANK] float64, by the definition."""
    keys = problem.cache.keys.view(-1, RANK + ROPE).double()
    rows = []
    for token, query in enumerate(problem.query.double()):
        own = keys[selected(problem, token)]
        rows.append(torch.softmax(SCALE * query @ own.T, dim=-1) @ own[:, :RANK])
    return torch.stack(rows)


def _slots(table: np.ndarray, length: int, block_size: int) -> torch.Tensor:
    positions = np.arange(length)
    return torch.from_numpy(table[positions // block_size] * block_size + positions % block_size)

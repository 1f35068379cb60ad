"""Attention by its definition, in float64, and random problems for it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from kernels.attention import (
    AttentionSpec,
    BatchGeometry,
    LayerAttention,
    LayerCache,
)
from kernels.reference.cache_quantisation import encode


@dataclass(frozen=True)
class Problem:
    """One step of a ragged batch over a cache that is nan wherever no sequence has written."""

    spec: AttentionSpec
    layer: LayerAttention
    geometry: BatchGeometry
    query: torch.Tensor
    cache: LayerCache


def make_problem(
    query_lens: list[int],
    past_lens: list[int],
    *,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
    sinks: torch.Tensor | None = None,
    cache_dtype: torch.dtype | None = None,
    value_dim: int | None = None,
    is_bidirectional: bool = False,
    slopes: torch.Tensor | None = None,
    seed: int = 0,
) -> Problem:
    """Make random queries and keys in randomly placed blocks, with poison between and after them.

    Keys and values are stored as codes of ``cache_dtype`` if given. With ``value_dim``, values are
    the first ``value_dim`` elements of keys. With ``is_bidirectional``, runs of queries see each
    other, as the tokens of an image do.
    """
    random = torch.Generator().manual_seed(seed)
    num_heads = num_kv_heads * group
    seq_lens = np.array(query_lens) + np.array(past_lens)
    blocks = -(-seq_lens // block_size)
    total = int(blocks.sum()) + 3
    places = torch.randperm(total, generator=random).numpy()
    tables = np.zeros((len(query_lens), int(blocks.max())), np.int64)
    shape = (total, num_kv_heads, block_size, head_dim)
    cache = LayerCache(*(torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)))
    if value_dim is not None:
        cache = LayerCache(cache.keys, cache.keys[..., :value_dim])
    taken = 0
    for row, (count, seq_len) in enumerate(zip(blocks, seq_lens, strict=True)):
        tables[row, :count] = places[taken : taken + count]
        taken += count
        for slot in range(seq_len):
            for stored in cache.tensors():
                value = torch.randn(num_kv_heads, stored.shape[-1], generator=random)
                stored[tables[row, slot // block_size], :, slot % block_size] = value.to(dtype)
    if cache_dtype is not None:
        cache = coded_cache(cache, cache_dtype)
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    # Queries lie between other heads, as in a fused projection.
    fused = torch.randn(int(starts[-1]), num_heads + 2, head_dim, generator=random) * 2
    scale = head_dim**-0.5
    return Problem(
        spec=AttentionSpec(
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            dtype,
            torch.device("cpu"),
            (window,),
            softcap,
            sinks is not None,
            slopes is not None,
            cache_dtype=cache_dtype,
            value_dim=value_dim,
            is_bidirectional=is_bidirectional,
        ),
        layer=LayerAttention(
            *(scale, window, softcap, sinks),
            is_bidirectional=is_bidirectional,
            slopes=slopes,
        ),
        geometry=BatchGeometry.of(
            starts,
            seq_lens,
            tables,
            torch.device("cpu"),
            _ends(query_lens, past_lens, seed) if is_bidirectional else None,
        ),
        query=fused.to(dtype)[:, :num_heads],
        cache=cache,
    )


def _ends(query_lens: list[int], past_lens: list[int], seed: int) -> np.ndarray:
    """The end of each query's view; every other run of random length sees all of itself."""
    random, found = np.random.default_rng(seed), []
    for count, past in zip(query_lens, past_lens, strict=True):
        ends = past + np.arange(count) + 1
        for begin, end in pairwise(random.integers(0, count + 1, 6)):
            if begin < end:
                ends[begin:end] = np.maximum(ends[begin:end], past + end)
        found.append(ends)
    return np.concatenate(found)


def coded_cache(cache: LayerCache, dtype: torch.dtype) -> LayerCache:
    """The same keys and values as codes; poison becomes a nan scale."""
    keys, key_scales = encode(cache.keys, dtype)
    values, value_scales = encode(cache.values, dtype)
    return LayerCache(keys, values, key_scales, value_scales)


def wide_cache(cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of a cache, dequantised, in float64."""
    if cache.key_scales is None or cache.value_scales is None:
        return cache.keys.double(), cache.values.double()
    return (
        cache.keys.double() * cache.key_scales.double().unsqueeze(-1),
        cache.values.double() * cache.value_scales.double().unsqueeze(-1),
    )


def attend(problem: Problem) -> torch.Tensor:
    """[num_tokens, num_heads, head_dim or value_dim] float64."""
    spec, layer, geometry = problem.spec, problem.layer, problem.geometry
    group = spec.num_heads // spec.num_kv_heads
    cache = wide_cache(problem.cache)
    shape = (*problem.query.shape[:2], cache[1].shape[-1])
    output = torch.zeros(shape, dtype=torch.float64)
    for row, seq_len in enumerate(geometry.seq_lens.tolist()):
        begin, end = geometry.query_start[row : row + 2].tolist()
        slots = np.arange(seq_len)
        blocks = geometry.tables[row][slots // spec.block_size]
        at = (torch.from_numpy(blocks), slice(None), torch.from_numpy(slots % spec.block_size))
        keys, values = (stored[at] for stored in cache)  # [L, kv heads, dim]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        query = problem.query[begin:end].double()
        scores = torch.einsum("qhd,lhd->hql", query, keys) * layer.scale
        places = torch.arange(seq_len - (end - begin), seq_len)[:, None]
        slots_seen = torch.arange(seq_len)[None, :]
        if layer.slopes is not None:
            scores += layer.slopes.double()[:, None, None] * (slots_seen - places)
        if layer.softcap is not None:
            scores = torch.tanh(scores / layer.softcap) * layer.softcap
        seen = slots_seen <= places
        if geometry.query_ends is not None:
            seen = slots_seen < torch.from_numpy(geometry.query_ends[begin:end])[:, None]
        if layer.window is not None:
            seen &= slots_seen > places - layer.window
        scores = scores.masked_fill(~seen, float("-inf"))
        if layer.sinks is not None:
            column = layer.sinks.double()[:, None, None].expand(-1, end - begin, 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :seq_len]
        output[begin:end] = torch.einsum("hql,lhd->qhd", weights, values)
    return output

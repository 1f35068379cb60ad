"""Check on the actual device that positions are selected and attended to as by the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kernels.attention import AttentionSpec, BatchGeometry, LayerAttention, LayerCache
from kernels.operations import Kernels
from kernels.reference import operations as reference
from kernels.reference.attention import ReferenceAttention
from kernels.reference.sparse import SlotAttention
from kernels.sparse import IndexQuery, SparseAttention
from kernels.triton.backend import MANY_SELECTIONS
from kernels.triton.check_helpers import CPU, Pairs, copy_to, normal
from kernels.triton.launch import INTERPRETED
from kernels.triton.selection import RUN

_HIDDEN = 1300


def selections(kernels: Kernels, spec: AttentionSpec, random: torch.Generator) -> Pairs:
    """Yield stored index keys, weights of heads, and attention to selections; nothing for models
    without an indexer."""
    if spec.selection is None:
        return
    yield from _stores(kernels, spec, random)
    heads = spec.selection.num_heads
    given = normal(random, spec.dtype, 3, _HIDDEN), normal(random, torch.float32, heads, _HIDDEN)
    x, weight = copy_to(given, spec.device)
    yield kernels.operations.index_weights(x, weight), reference.index_weights(*given)
    yield from _attention(kernels, spec, random)


def _stores(kernels: Kernels, spec: AttentionSpec, random: torch.Generator) -> Pairs:
    """Yield rotated queries and normed keys, with and without queries; one token is padding."""
    assert spec.selection is not None
    assert spec.value_dim is not None
    _, heads, width = spec.selection
    query, key = normal(random, spec.dtype, 5, heads, width), normal(random, spec.dtype, 5, width)
    norm = normal(random, spec.dtype, width), normal(random, spec.dtype, width)
    frequencies = torch.logspace(0, -4, (spec.head_dim - spec.value_dim) // 2)
    rotation = reference.rope_tables(torch.arange(5) * 100, frequencies, 1.0)
    slots = torch.tensor([3, 0, -1, 2 * spec.block_size, 1])
    stored = torch.zeros(4, 1, spec.block_size, width, dtype=spec.dtype)
    for each in (query, None):
        sides = []
        for operations, device in ((kernels.operations, spec.device), (reference, CPU)):
            given = copy_to((each, key, norm, rotation, stored, slots), device)
            turned, own, by, angles, kept, where = given
            operations.index_rope_store(turned, own, by, 1e-6, angles, kept, where)
            sides.append(kept if each is None else (turned, kept))
        yield sides[0], sides[1]


def _attention(kernels: Kernels, spec: AttentionSpec, random: torch.Generator) -> Pairs:
    """Yield a step of single queries, with many positions and few, and one with chunks.

    Index keys and queries are whole numbers. So scores are exact, and many of them equal.
    """
    assert spec.selection is not None
    top_k, heads, width = spec.selection
    # So far that several programs select, and so many that they are attended to in tiles.
    far, many = top_k + 300, MANY_SELECTIONS
    if INTERPRETED:
        many = 3
    else:
        far += 2 * RUN
    for counts, past in (([1, 1, 1], [far, 5, 40]), ([many, 1, 2], [top_k + 20, 0, top_k])):
        queries = np.array(counts)
        seq_lens = queries + np.array(past)
        blocks = -(-seq_lens // spec.block_size)
        places = torch.randperm(int(blocks.sum()), generator=random).numpy()
        tables = np.zeros((len(blocks), int(blocks.max())), np.int32)
        for row, (end, count) in enumerate(zip(np.cumsum(blocks), blocks, strict=True)):
            tables[row, :count] = places[end - count : end]
        shape = len(places), 1, spec.block_size
        total, starts = int(queries.sum()), np.append(0, np.cumsum(queries))
        given = (
            normal(random, spec.dtype, total, heads, width).round(),
            normal(random, torch.float32, total, heads).round(),
            normal(random, spec.dtype, *shape, width).round(),
            normal(random, spec.dtype, *shape, spec.head_dim),
            normal(random, spec.dtype, total, spec.num_heads, spec.head_dim),
        )
        found, expected = _slots(kernels, spec, given, seq_lens, tables)
        yield found, expected
        if not torch.equal(found.cpu(), expected):
            return  # attention would read anything anywhere
        sides = []
        for backend, side in (
            (SparseAttention(kernels.attention, kernels.operations), spec),
            (
                SparseAttention(ReferenceAttention(), reference, SlotAttention()),
                replace(spec, device=CPU),
            ),
        ):
            query, weights, index_keys, keys, queried = copy_to(given, side.device)
            state = backend.plan(BatchGeometry.of(starts, seq_lens, tables, side.device), side)
            backend.select(state, IndexQuery(query, weights), index_keys)
            cache = LayerCache(keys, keys[..., : spec.value_dim])
            layer = LayerAttention(spec.head_dim**-0.5)
            sides.append(backend.forward(state, layer, queried, cache))
        yield sides[0], sides[1]


def _slots(
    kernels: Kernels,
    spec: AttentionSpec,
    given: tuple[torch.Tensor, ...],
    seq_lens: np.ndarray,
    tables: np.ndarray,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what each row's first query selects, as if it were the row's last one."""
    assert spec.selection is not None
    count, sides = len(seq_lens), []
    rows = np.arange(count + 1)
    for operations, device in ((kernels.operations, spec.device), (reference, CPU)):
        query, weights, index_keys, *_ = copy_to(given, device)
        tokens = BatchGeometry.of(rows, seq_lens, tables, device).device
        slots = torch.zeros(count, spec.selection.top_k, dtype=torch.int32, device=device)
        index = IndexQuery(query[:count], weights[:count])
        operations.select_slots(index, index_keys, tokens, int(seq_lens.max()), slots)
        sides.append(slots)
    return sides[0], sides[1]

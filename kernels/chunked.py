"""Attention within chunks of the context (Llama 4), on any backend.

A query attends to the tokens of its own chunk of positions, up to itself. For attention such a
chunk is a sequence of its own, which begins with the chunk's first block. So the geometry of a step
is cut into chunks, and the inner backend needs no support for them. (The CPU's has its own,
``Kernels.supports_chunked_attention``.)

    positions   0 ........ 7 | 8 ....... 15 | 16 ... 18        a row of 19 tokens, chunks of 8
    queries             [ 6      ...           18 ]            13 of them
    rows                [6 7]  [8 ....... 15] [16  18]         of lengths 8, 8 and 3
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kernels.attention import (
    AttentionBackend,
    AttentionSpec,
    BatchGeometry,
    DeviceGeometry,
    LayerAttention,
    LayerCache,
)
from kernels.transfer import to_device


@dataclass(frozen=True, slots=True)
class ChunkedState:
    """The plans of a step."""

    full: Any  # for layers with full attention
    chunked: Any


class ChunkedAttention:
    """A backend for models with chunked layers, built on one without chunks.

    Args:
        inner: the backend that computes.
    """

    def __init__(self, inner: AttentionBackend) -> None:
        self.name = inner.name
        self.is_capturable = inner.is_capturable
        self._inner = inner

    def refuse(self, spec: AttentionSpec) -> str | None:
        """See ``AttentionBackend.refuse``."""
        if spec.is_bidirectional:
            return "no query sees another chunk's positions, nor those behind its own"
        if spec.chunk_size is not None and spec.chunk_size % spec.block_size:
            size = spec.block_size
            return f"attention chunks of {spec.chunk_size} tokens are not made of blocks of {size}"
        return self._inner.refuse(spec)

    def can_replay(
        self, captured: BatchGeometry, actual: BatchGeometry, spec: AttentionSpec
    ) -> bool:
        """See ``AttentionBackend.can_replay``."""
        assert spec.chunk_size is not None
        if _fits_first_chunk(captured, spec.chunk_size) and not _fits_first_chunk(
            actual, spec.chunk_size
        ):
            return False  # captured without cutting
        inner = self._inner
        return inner.can_replay(captured, actual, spec) and inner.can_replay(
            _clamp_to_chunk(captured, spec.chunk_size),
            _clamp_to_chunk(actual, spec.chunk_size),
            spec,
        )

    def plan(self, geometry: BatchGeometry, spec: AttentionSpec) -> ChunkedState:
        """See ``AttentionBackend.plan``."""
        assert spec.chunk_size is not None
        whole = self._inner.plan(geometry, spec)
        if _fits_first_chunk(geometry, spec.chunk_size):
            return ChunkedState(whole, whole)
        return ChunkedState(whole, self._inner.plan(self._split(geometry, spec), spec))

    def forward(
        self,
        state: ChunkedState,
        layer: LayerAttention,
        query: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        plan = state.full if layer.chunk_size is None else state.chunked
        return self._inner.forward(plan, layer, query, cache)

    def _split(self, geometry: BatchGeometry, spec: AttentionSpec) -> BatchGeometry:
        assert spec.chunk_size is not None
        if _fits_first_chunk(geometry, spec.chunk_size):
            return geometry
        if int(np.diff(geometry.query_start).max()) > 1:
            return _split_ragged(geometry, spec.chunk_size, spec.block_size)
        return _split_single(geometry, spec.chunk_size, spec.block_size, bounds=self.is_capturable)


def _fits_first_chunk(geometry: BatchGeometry, chunk: int) -> bool:
    """Return whether all rows are within their first chunk."""
    return int(geometry.seq_lens.max()) <= chunk


def _clamp_to_chunk(geometry: BatchGeometry, chunk: int) -> BatchGeometry:
    """Limit rows of one query each to the length of a chunk, for the host's bounds."""
    return replace(geometry, seq_lens=np.minimum(geometry.seq_lens, chunk).astype(np.int32))


def _split_single(
    geometry: BatchGeometry, chunk: int, block_size: int, *, bounds: bool
) -> BatchGeometry:
    """Cut rows of one query each: they begin with that query's chunk.

    With ``bounds``, the host's lengths are only bounds, and the device uses its own.
    """
    lens, own = geometry.seq_lens, geometry.device
    skipped = np.maximum(lens - 1, 0) // chunk
    seq_lens = np.minimum(lens, chunk) if bounds else lens - skipped * chunk
    skipped_there = torch.clamp(own.seq_lens - 1, min=0) // chunk
    rows = torch.arange(lens.size, dtype=torch.int32, device=own.slots.device)
    on_device = DeviceGeometry(
        own.query_start,
        own.seq_lens - skipped_there * chunk,
        rows,
        _shift_tables(own.tables, own.slots, skipped_there, chunk // block_size),
    )
    tables = _shift_tables_on_host(geometry.tables, geometry.slots, skipped, chunk // block_size)
    return BatchGeometry(
        geometry.query_start,
        seq_lens.astype(np.int32),
        np.arange(lens.size, dtype=np.int32),
        tables,
        on_device,
    )


def _split_ragged(geometry: BatchGeometry, chunk: int, block_size: int) -> BatchGeometry:
    """Cut rows of several queries into one row for each chunk that has a query."""
    ends = geometry.seq_lens.astype(np.int64)
    starts = ends - np.diff(geometry.query_start)
    first, last = starts // chunk, (ends - 1) // chunk
    row = np.repeat(np.arange(ends.size), last - first + 1)
    before = np.cumsum(last - first + 1) - (last - first + 1)
    number = first[row] + np.arange(row.size) - before[row]  # of the chunk
    piece_ends = np.minimum(ends[row], (number + 1) * chunk)
    queries = piece_ends - np.maximum(starts[row], number * chunk)
    query_start = np.append(0, np.cumsum(queries)).astype(np.int32)
    seq_lens = (piece_ends - number * chunk).astype(np.int32)
    slots, lines = geometry.slots[row], np.arange(row.size, dtype=np.int32)
    skipped, own = number.astype(np.int32), geometry.device
    device = own.tables.device
    host = (query_start, seq_lens, lines, slots, skipped)
    starts, lens, rows, where, shifts = (
        to_device(torch.from_numpy(array), device) for array in host
    )
    tables = _shift_tables(own.tables, where, shifts, chunk // block_size)
    on_host = _shift_tables_on_host(geometry.tables, slots, skipped, chunk // block_size)
    on_device = DeviceGeometry(starts, lens, rows, tables)
    return BatchGeometry(query_start, seq_lens, lines, on_host, on_device)


def _shift_tables(
    tables: torch.Tensor, slots: torch.Tensor, skipped: torch.Tensor, num_blocks: int
) -> torch.Tensor:
    """Return table lines that begin at a chunk's first block: [rows, blocks of a chunk] int32."""
    width = min(tables.shape[1], num_blocks)
    columns = torch.arange(width, device=tables.device) + (skipped * num_blocks).unsqueeze(1)
    columns = columns.clamp_(max=tables.shape[1] - 1)  # after a row's end any column will do
    return tables.index_select(0, slots).gather(1, columns)


def _shift_tables_on_host(
    tables: np.ndarray, slots: np.ndarray, skipped: np.ndarray, num_blocks: int
) -> np.ndarray:
    width = min(tables.shape[1], num_blocks)
    columns = np.minimum(np.arange(width) + skipped[:, None] * num_blocks, tables.shape[1] - 1)
    return np.take_along_axis(tables[slots], columns, axis=1)

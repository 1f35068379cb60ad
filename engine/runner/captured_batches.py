"""The bounds of captured steps, and the padding of the batches that they serve; on the host."""

from __future__ import annotations

import numpy as np

from engine.kv_cache.storage import KVCache
from engine.runner.inputs import HostBatch
from engine.runner.step_builder import RowLines
from kernels.attention import AttentionSpec

# Sequences may share blocks, so the sum of their lengths may exceed the cache's slots.
_LENGTH_OVERCOMMIT = 2
# More rows with several tokens make a tile each, which all sizes would have to provide for.
MAX_CHUNKS = 16


def longest_row(num_rows: int, cache: KVCache, lines: RowLines, spec: AttentionSpec) -> int:
    """Return the longest row to capture for, so that all rows together fill the cache."""
    of_a_row = lines.host_tables.shape[1] * cache.block_size
    shortest = 1 if spec.source is None else spec.source.num_places + 1
    shares = -(-_LENGTH_OVERCOMMIT * cache.num_blocks * cache.block_size // num_rows)
    return min(of_a_row, max(shares, shortest))


def decode_bounds(size: int, longest: int, padding_slot: int) -> HostBatch:
    """Make a decode batch on the host that bounds the batches of a captured step."""
    return HostBatch(
        slots=np.full(size, padding_slot, np.int32),
        query_start=np.arange(size + 1, dtype=np.int32),
        starts=np.full(size, longest - 1, np.int32),
        token_ids=np.zeros(size, np.int32),
        sampling_rows=np.arange(size, dtype=np.int32),
    )


def prompt_bounds(size: int, num_rows: int, num_slots: int, padding_slot: int) -> HostBatch:
    """Make a batch on the host with no fewer tiles and splits than those that a size serves.

    It has one chunk of all tokens and others of two, and texts that fill ``num_slots`` of the
    cache: more than there can be, so it bounds the plan alone.
    """
    num_chunks = min(MAX_CHUNKS, num_rows - 1)
    lengths = np.ones(num_rows, np.int32)
    lengths[:num_chunks], lengths[0] = 2, size
    starts = np.zeros(num_rows, np.int32)
    starts[num_chunks:] = -(-num_slots // (num_rows - num_chunks))
    return HostBatch(
        slots=np.full(num_rows, padding_slot, np.int32),
        query_start=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        starts=starts,
        token_ids=np.zeros(size, np.int32),
        sampling_rows=np.arange(num_rows, dtype=np.int32),
    )


def padded_rows(size: int, max_num_rows: int) -> int:
    """Return how many rows a captured step of ``size`` tokens has.

    One is for the tokens that a step lacks, and another one so that even of few rows all may be
    chunks (``prompt_bounds``). As many rows as tokens would mean one token each (``StepRows``).
    """
    num_rows = min(size, max_num_rows) + 2
    return num_rows + 1 if num_rows == size else num_rows


def pad_prompt(batch: HostBatch, num_rows: int, size: int, padding_slot: int) -> HostBatch:
    """Add the rows and tokens that a step lacks; the last row has the tokens, before position 0."""
    count, num_tokens = batch.slots.size, batch.token_ids.size
    slots = np.full(num_rows, padding_slot, np.int32)
    query_start = np.full(num_rows + 1, num_tokens, np.int32)
    starts, token_ids = np.zeros(num_rows, np.int32), np.zeros(size, np.int32)
    slots[:count], starts[:count], starts[-1] = batch.slots, batch.starts, num_tokens - size
    query_start[: count + 1], query_start[-1] = batch.query_start, size
    token_ids[:num_tokens] = batch.token_ids
    return HostBatch(slots, query_start, starts, token_ids, batch.sampling_rows)

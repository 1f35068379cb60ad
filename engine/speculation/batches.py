"""Batches for a draft model with one token in each row."""

from __future__ import annotations

import numpy as np

from engine.runner.inputs import HostBatch
from engine.speculation.read_blocks import ReadState


def unread_batch(slots: np.ndarray, reads: list[ReadState], lengths: list[int]) -> HostBatch:
    """The unread tokens of the given rows, each as a row of its own."""
    return decode_batch(
        np.repeat(slots, lengths),
        np.array([at for read in reads for at in range(read.num_read, read.end)]),
        np.array([token for read in reads for token in read.unread]),
    )


def decode_batch(slots: np.ndarray, starts: np.ndarray, token_ids: np.ndarray) -> HostBatch:
    """One token per row, each of which is sampled after."""
    return HostBatch(
        slots=slots,
        query_start=np.arange(slots.size + 1, dtype=np.int32),
        starts=starts.astype(np.int32),
        token_ids=token_ids.astype(np.int32),
        sampling_rows=np.arange(slots.size, dtype=np.int32),
    )

"""Turn a plan's rows into one ragged batch: all tokens concatenated, without padding.

The host sends slots and positions in one transfer. What the rows hold (block tables, newest tokens)
is on the device, and the inputs are built there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from engine.plan_rows import PlanRows
from engine.runner.rows import RowTable
from engine.runner.transfer import Uploads
from engine.types import BlockCopy
from kernels.inputs import StepRows

_NO_COPIES = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The rows of a step on the host; all int32. N tokens in R rows."""

    slots: np.ndarray  # [R], in the RowTable
    query_start: np.ndarray  # [R + 1]
    starts: np.ndarray  # [R]
    token_ids: np.ndarray  # [N], PENDING_TOKEN if the id is on the device
    sampling_rows: np.ndarray  # [S], the sampling rows

    @property
    def seq_lens(self) -> np.ndarray:
        """[R], including this step's tokens."""
        return self.starts + np.diff(self.query_start)

    @property
    def positions(self) -> np.ndarray:
        """[N] int32."""
        before = self.starts - self.query_start[:-1]
        places = np.arange(self.token_ids.size, dtype=np.int32)
        return np.repeat(before, np.diff(self.query_start)) + places

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token and samples the next."""
        return self.token_ids.size == self.slots.size == self.sampling_rows.size


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The batch on the device, and the block copies to make first."""

    rows: StepRows
    sampling_rows: torch.Tensor  # [S] int32
    copy_sources: torch.Tensor  # [c] int32
    copy_targets: torch.Tensor  # [c] int32

    @property
    def last_tokens(self) -> torch.Tensor:
        """[S] int32, the indices of the sampling rows' last tokens in the batch."""
        return self.rows.query_start[1:].index_select(0, self.sampling_rows) - 1


def host_batch(rows: PlanRows, table: RowTable) -> HostBatch:
    """Make the batch of a step, in row order.

    Args:
        rows: at least one, each with at least one token.
        table: holds every row.
    """
    token_ids = list(chain.from_iterable(rows.token_ids))
    query_start = np.arange(len(rows) + 1, dtype=np.int32)
    if len(token_ids) > len(rows):
        np.cumsum(list(map(len, rows.token_ids)), out=query_start[1:])
    sampling_rows = np.arange(len(rows), dtype=np.int32)
    if rows.unsampled:
        sampling_rows = np.delete(sampling_rows, list(rows.unsampled))
    return HostBatch(
        slots=_int32(table.slots(rows.ids)),
        query_start=query_start,
        starts=_int32(rows.starts),
        token_ids=_int32(token_ids),
        sampling_rows=sampling_rows,
    )


def extend_tables(rows: PlanRows, table: RowTable) -> None:
    """Append the rows' new blocks to their block tables."""
    if rows.new_blocks:
        table.extend(
            table.slots(map(rows.ids.__getitem__, rows.new_blocks)), rows.new_blocks.values()
        )


def send(
    batch: HostBatch, copies: tuple[BlockCopy, ...], table: RowTable, uploads: Uploads
) -> DeviceBatch:
    """Send a step and all changes of the row table to the device in one transfer."""
    sent = uploads.send(
        (
            batch.slots,
            batch.query_start,
            batch.starts,
            batch.token_ids,
            batch.sampling_rows,
            *_copies(copies),
            *table.changes(),
        )
    )
    table.write(*sent[7:])
    slots, query_start, starts, token_ids, *_ = sent
    return DeviceBatch(StepRows(slots, query_start, starts, token_ids), *sent[4:7])


class AttentionEnds(NamedTuple):
    """For each token, one past the last position that it attends to, where it may look ahead."""

    host: np.ndarray  # [N] int32
    device: torch.Tensor


def _int32(values: Sequence[int]) -> np.ndarray:
    """Convert to an array faster than numpy, which first inspects what a list holds."""
    return np.fromiter(values, np.int32, len(values))


def _copies(copies: tuple[BlockCopy, ...]) -> tuple[np.ndarray, np.ndarray]:
    if not copies:
        return _NO_COPIES, _NO_COPIES
    pairs = np.array(copies, np.int32).reshape(-1, 2)
    return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])

"""A plan's rows become one ragged batch: all tokens one after the other, no padding."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from engine.runner.rows import RowTable
from engine.types import ScheduledRow
from kernels.attention import BatchGeometry


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """What one forward pass reads. N tokens of R rows."""

    input_ids: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64
    slot_mapping: torch.Tensor  # [N] int64: where each token's keys and values go
    geometry: BatchGeometry  # query_start, seq_lens and block tables, on the host
    slots: np.ndarray  # [R] int64, the rows' slots in the RowTable
    sampling_rows: np.ndarray  # [S] int64, the rows that choose a token
    sampling_tokens: torch.Tensor  # [S] int64, their last tokens' places among the N


def build_input(
    rows: tuple[ScheduledRow, ...], table: RowTable, block_size: int, device: torch.device
) -> ForwardInput:
    """The batch of a step, in the order of its rows. Extends the rows' state.

    Args:
        rows: at least one, each with at least one token.
        table: knows every row.
        block_size: tokens a block.
        device: where the tensors go.
    """
    slots = np.array(table.extend(rows), np.int64)
    starts = np.array([row.start for row in rows], np.int64)
    lengths = np.array([len(row.token_ids) for row in rows], np.int64)
    query_start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=query_start[1:])
    seq_lens = starts + lengths
    num_tokens = int(query_start[-1])
    input_ids = np.fromiter(
        chain.from_iterable(row.token_ids for row in rows), np.int64, num_tokens
    )
    positions = np.arange(num_tokens) + np.repeat(starts - query_start[:-1], lengths)
    blocks = table.block_tables[np.repeat(slots, lengths), positions // block_size].astype(np.int64)
    sampling_rows = np.flatnonzero([row.samples for row in rows])
    return ForwardInput(
        input_ids=torch.from_numpy(input_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        slot_mapping=torch.from_numpy(blocks * block_size + positions % block_size).to(device),
        geometry=BatchGeometry.of(query_start, seq_lens, table.block_tables[slots], device),
        slots=slots,
        sampling_rows=sampling_rows,
        sampling_tokens=torch.from_numpy(query_start[1:][sampling_rows] - 1).to(device),
    )

"""How single queries are cut into work for ``decode.py``: on the device, from lengths there.

Splits have a fixed *size*, not a fixed count: which keys are summed together depends on a row's
own length alone, so its result is the same bits whatever else is in the batch. The plan is made
on the device from lengths that lie there: one captured CUDA graph serves all lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.triton.launch import launch

# Slots. One sequence of 4k and 8 KV heads then makes 128 work items, about one for each
# multiprocessor; and the partial results of a group of 4 heads weigh 3 % of the keys and values
# that they come from, and are read again while they are still in the L2 cache.
SPLIT_SIZE = 256
_PLAN_ROWS = 512


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How the rows of a step are cut into work items, for one window. Lives on the device."""

    query_rows: torch.Tensor  # [rows] int32, each row's token in the batch
    seq_lens: torch.Tensor  # [rows] int32; 0: a padding row, its output is 0
    block_tables: torch.Tensor  # [rows, width] int32
    split_starts: torch.Tensor  # [rows + 1] int32, first split of each row
    split_rows: torch.Tensor  # [capacity] int32, row of each split
    window: int | None


def num_splits(seq_lens: np.ndarray) -> np.ndarray:
    """Splits of rows of these lengths without a window; with one there are no more."""
    return -(-seq_lens // SPLIT_SIZE)


def plan_decode(
    query_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    window: int | None,
    capacity: int,
) -> DecodePlan:
    """Cut each row into splits, on the device and without waiting for it.

    Args:
        query_rows: [rows] int32, where each row's one query lies in the batch.
        seq_lens: [rows] int32, slots in use, the query's own included.
        block_tables: [rows, width] int32, contiguous rows.
        window: slots that a query sees, or None for all.
        capacity: at least the number of splits, see ``num_splits``.
    """
    num_rows = seq_lens.shape[0]
    starts = torch.empty(num_rows + 1, dtype=torch.int32, device=seq_lens.device)
    rows = torch.empty(capacity, dtype=torch.int32, device=seq_lens.device)
    launch(
        _plan_kernel,
        (num_rows,),
        starts,
        rows,
        seq_lens,
        num_rows,
        SPLIT_SIZE=SPLIT_SIZE,
        WINDOW=window or 0,
        ROWS=_PLAN_ROWS,
        TILE=128,
    )
    return DecodePlan(query_rows, seq_lens, block_tables, starts, rows, window)


@triton.jit
def first_split_of(seq_len, SPLIT_SIZE: tl.constexpr, WINDOW: tl.constexpr):
    """The first run of slots, counted from the sequence's start, that the query sees."""
    if WINDOW > 0:
        return tl.maximum(seq_len - WINDOW, 0) // SPLIT_SIZE
    else:
        return seq_len * 0


@triton.jit
def _num_splits(seq_len, SPLIT_SIZE: tl.constexpr, WINDOW: tl.constexpr):
    return tl.cdiv(seq_len, SPLIT_SIZE) - first_split_of(seq_len, SPLIT_SIZE, WINDOW)


# The arguments of a kernel that change from step to step are not specialised on: a new
# combination would compile while requests wait.
@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["starts", "split_rows", "seq_lens"],
)
def _plan_kernel(
    starts,  # [num_rows + 1] out
    split_rows,  # [capacity] out
    seq_lens,
    num_rows,
    SPLIT_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a row; each sums the splits before its row by itself, so none waits."""
    row = tl.program_id(0)
    before = tl.zeros([ROWS], tl.int32)
    for begin in range(0, row, ROWS):
        rows = begin + tl.arange(0, ROWS)
        before += _num_splits(
            tl.load(seq_lens + rows, mask=rows < row, other=0), SPLIT_SIZE, WINDOW
        )
    start = tl.sum(before, axis=0)
    count = _num_splits(tl.load(seq_lens + row), SPLIT_SIZE, WINDOW)
    tl.store(starts + row, start)
    if row == num_rows - 1:
        tl.store(starts + num_rows, start + count)
    for first in range(0, count, TILE):
        splits = first + tl.arange(0, TILE)
        tl.store(split_rows + start + splits, row + splits * 0, mask=splits < count)

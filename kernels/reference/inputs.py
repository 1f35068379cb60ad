"""A step's inputs in plain torch: the reference of the kernel that builds them on the device."""

from __future__ import annotations

import torch

from kernels.inputs import StepInputs, StepRows


def build_inputs(
    rows: StepRows,
    newest: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    max_query: int,
) -> StepInputs:
    """Build the inputs of a step from each row's slot.

    Args:
        rows: the step's.
        newest: [slots] int64, the last sampled token of each request.
        tables: [slots, width] int32, the blocks of each request.
        block_size: tokens per block.
        max_query: an upper bound of one row's tokens; known to the host, for the grid.
    """
    lengths = rows.query_start.diff().long()
    row_of = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths)
    slots = rows.slots.long()[row_of]
    within = torch.arange(row_of.numel(), device=lengths.device) - rows.query_start[row_of]
    positions = rows.starts[row_of] + within
    fed = rows.token_ids.long()
    blocks = tables[slots, positions.clamp(min=0) // block_size].long()
    ends = rows.starts + lengths
    return StepInputs(
        input_ids=torch.where(fed < 0, newest[slots], fed),
        positions=positions,
        slot_mapping=torch.where(positions < 0, -1, blocks * block_size + positions % block_size),
        seq_lens=ends.to(torch.int32),
        next_positions=ends,
    )

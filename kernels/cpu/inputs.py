"""A step's inputs, by ``native/inputs.cpp``."""

from __future__ import annotations

import torch

from kernels.cpu.bindings import function
from kernels.inputs import StepInputs, StepRows


def build_inputs(
    rows: StepRows,
    newest: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    max_query: int,
) -> StepInputs:
    """See ``kernels.reference.inputs``; ``max_query`` is for grids, which a CPU does not have."""
    num_rows, num_tokens = rows.slots.numel(), rows.token_ids.numel()
    input_ids, positions, slot_mapping = torch.empty((3, num_tokens), dtype=torch.int64)
    seq_lens = torch.empty(num_rows, dtype=torch.int32)
    next_positions = torch.empty(num_rows, dtype=torch.int64)
    function("quire_build_inputs")(
        num_rows,
        rows.slots.data_ptr(),
        rows.query_start.data_ptr(),
        rows.starts.data_ptr(),
        rows.token_ids.data_ptr(),
        newest.data_ptr(),
        tables.data_ptr(),
        tables.shape[1],
        block_size,
        input_ids.data_ptr(),
        positions.data_ptr(),
        slot_mapping.data_ptr(),
        seq_lens.data_ptr(),
        next_positions.data_ptr(),
    )
    return StepInputs(input_ids, positions, slot_mapping, seq_lens, next_positions)

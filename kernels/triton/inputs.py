"""Build a step's inputs on the device, from what earlier steps left there.

The host sends one packed transfer a step (``StepRows``). Tokens sampled by the previous step are
read on the device, so the host need not have seen them yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.inputs import StepInputs, StepRows
from kernels.triton.launch import launch, wait_for_prior_kernels

_TILE = 256


def build_inputs(
    rows: StepRows,
    newest: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    max_query: int,
) -> StepInputs:
    """See ``kernels.reference.inputs.build_inputs``; tables are contiguous."""
    num_rows, num_tokens, width = rows.slots.shape[0], rows.token_ids.shape[0], tables.shape[1]
    device = tables.device
    input_ids = torch.empty(num_tokens, dtype=torch.int64, device=device)
    positions = torch.empty_like(input_ids)
    slot_mapping = torch.empty_like(input_ids)
    seq_lens = torch.empty(num_rows, dtype=torch.int32, device=device)
    next_positions = torch.empty(num_rows, dtype=torch.int64, device=device)
    launch(
        _build_inputs_kernel,
        (num_rows, -(-max_query // _TILE)),
        input_ids,
        positions,
        slot_mapping,
        seq_lens,
        next_positions,
        rows.slots,
        rows.query_start,
        rows.starts,
        rows.token_ids,
        newest,
        tables,
        width,
        BLOCK_SIZE=block_size,
        TILE=_TILE,
        num_warps=2,
    )
    return StepInputs(input_ids, positions, slot_mapping, seq_lens, next_positions)


# Slices of one buffer have any alignment; compiling for each one would cause stalls.
@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["slots", "query_start", "starts", "token_ids", "tables"],
)
def _build_inputs_kernel(
    input_ids,
    positions,
    slot_mapping,
    seq_lens,
    next_positions,
    slots,
    query_start,
    starts,
    token_ids,
    newest,
    tables,
    width,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of one row's tokens."""
    wait_for_prior_kernels()
    row, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    begin, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    start = tl.load(starts + row)
    seq_len = start + end - begin
    if tile == 0:
        tl.store(seq_lens + row, seq_len)
        tl.store(next_positions + row, seq_len.to(tl.int64))
    within = tile * TILE + tl.arange(0, TILE)

    is_token = within < end - begin
    at = begin + within
    fed = tl.load(token_ids + at, mask=is_token, other=0)
    chosen = tl.load(newest + slot)
    tl.store(input_ids + at, tl.where(fed < 0, chosen, fed.to(tl.int64)), mask=is_token)
    position = start + within
    tl.store(positions + at, position.to(tl.int64), mask=is_token)
    is_placed = is_token & (position >= 0)
    block = tl.load(tables + slot * width + position // BLOCK_SIZE, mask=is_placed, other=0)
    place = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slot_mapping + at, tl.where(position >= 0, place, -1), mask=is_token)

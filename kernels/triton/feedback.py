"""Feedback of sampled tokens to the next step: one launch at the end of a captured step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sampling import TokenCounts
from kernels.triton.launch import launch, wait_for_prior_kernels

_TILE = 128


def feed_back(
    newest: torch.Tensor,
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    count_line: torch.Tensor,
    counts: TokenCounts | None = None,
) -> None:
    """See ``kernels.reference.feedback.feed_back``."""
    num_rows = slots.shape[0]
    output = None if counts is None else counts.output
    launch(
        _feed_back_kernel,
        (-(-num_rows // _TILE),),
        newest,
        output,
        slots,
        token_ids,
        count_line,
        num_rows,
        0 if output is None else output.shape[1],
        TILE=_TILE,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots", "token_ids"])
def _feed_back_kernel(
    newest, counts, slots, token_ids, count_line, num_rows, vocab, TILE: tl.constexpr
):
    wait_for_prior_kernels()
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_row = rows < num_rows
    slot = tl.load(slots + rows, mask=is_row, other=0)
    token = tl.load(token_ids + rows, mask=is_row, other=0)
    tl.store(newest + slot, token, mask=is_row)
    if counts is not None:
        line = tl.load(count_line + slot, mask=is_row, other=-1).to(tl.int64)
        # Not atomic: a line belongs to one request, and a request has one row.
        place = counts + line * vocab + token
        is_counted = line >= 0
        count = tl.load(place, mask=is_counted, other=0)
        tl.store(place, count + 1, mask=is_counted)

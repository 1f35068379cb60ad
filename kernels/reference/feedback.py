"""Feedback of sampled tokens to the next step on the device, in plain torch."""

from __future__ import annotations

import torch

from kernels.sampling import TokenCounts


def feed_back(
    newest: torch.Tensor,
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    count_line: torch.Tensor,
    counts: TokenCounts | None = None,
) -> None:
    """Store the sampled tokens for the next step's inputs and penalties.

    Args:
        newest: [slots] int64, the last sampled token of each request; updated.
        slots: [n] int32, the rows' slots, all distinct; padding rows may share an unused one.
        token_ids: [n] int64, as sampled.
        count_line: [slots] int32, each request's line of the counts; -1: it has none.
        counts: its ``output`` is updated; None: no request has a line.
    """
    slots = slots.long()
    newest[slots] = token_ids
    if counts is not None:
        lines = count_line[slots].long()
        is_counted = (lines >= 0).to(counts.output.dtype)
        counts.output.index_put_((lines.clamp(min=0), token_ids), is_counted, accumulate=True)

"""What a step leaves on the device for the next, in plain torch."""

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
    """Keep the chosen tokens where the next step's inputs and penalties look for them.

    Args:
        newest: [slots] int64, the last token chosen for each request; written.
        slots: [n] int32, the rows' places, all different; padding rows may share one that no
            request has.
        token_ids: [n] int64, as sampled.
        count_line: [slots] int32, each request's line of the counts; -1: it has none.
        counts: whose ``output`` is added to; None: no request has a line.
    """
    slots = slots.long()
    newest[slots] = token_ids
    if counts is not None:
        lines = count_line[slots].long()
        is_counted = (lines >= 0).to(counts.output.dtype)
        counts.output.index_put_((lines.clamp(min=0), token_ids), is_counted, accumulate=True)

"""Feedback of sampled tokens to the next step, by ``native/feedback.cpp``."""

from __future__ import annotations

import torch

from kernels.cpu.bindings import function, pointer
from kernels.sampling import TokenCounts


def feed_back(
    newest: torch.Tensor,
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    count_line: torch.Tensor,
    counts: TokenCounts | None = None,
) -> None:
    """See ``kernels.reference.feedback``."""
    output = None if counts is None else counts.output
    function("quire_feed_back")(
        newest.data_ptr(),
        slots.data_ptr(),
        token_ids.data_ptr(),
        slots.numel(),
        count_line.data_ptr(),
        pointer(output),
        0 if output is None else output.shape[1],
    )

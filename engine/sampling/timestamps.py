"""Where a transcript's next token must be a timestamp (Radford et al. 2022)."""

from __future__ import annotations

import torch


def prefer_timestamps(
    logits: torch.Tensor, rows: torch.Tensor, begin: int, masks: torch.Tensor
) -> None:
    """Forbid other tokens to rows in which all allowed timestamps together are likelier than any
    other allowed token.

    Nothing waits for the device: which rows these are is known there alone.

    Args:
        logits: [n, vocab] float32; updated in place.
        rows: [m] int64, the rows of texts with timestamps.
        begin: the first timestamp; all tokens from there on are timestamps.
        masks: [m, ceil(vocab / 32)] int32, bit i % 32 of word i // 32: token i is allowed.
    """
    scores = logits.index_select(0, rows)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = masks.unsqueeze(2).bitwise_right_shift(bits).bitwise_and_(1).flatten(1).bool()
    scores.masked_fill_(~allowed[:, : scores.shape[1]], float("-inf"))
    others = scores[:, :begin]
    is_due = scores[:, begin:].logsumexp(1) > others.amax(1)
    others.masked_fill_(is_due.unsqueeze(1), float("-inf"))
    logits.index_copy_(0, rows, scores)

"""Log-probabilities in the form reported to clients."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.types import TokenLogprobs


class LogprobColumns(NamedTuple):
    """Log-probabilities at n positions, computed on the device and read on the host."""

    token_ids: torch.Tensor  # [n] int64
    logprobs: torch.Tensor  # [n] float32
    ranks: torch.Tensor  # [n] int64, 1 for the most likely token
    top_ids: torch.Tensor  # [n, widest] int64, descending
    top_logprobs: torch.Tensor  # [n, widest] float32


def logprob_columns(logits: torch.Tensor, token_ids: torch.Tensor, widest: int) -> LogprobColumns:
    """The log-probability and rank of one token per row, and the row's ``widest`` most likely ones.

    They are those of the raw distribution, by log_softmax in float32. A token's own value and its
    entry among the most likely come from the same tensor, and so are the same float.

    Args:
        logits: [n, vocab] float32, before temperature and other processing.
        token_ids: [n] int64.
        widest: the most alternatives that any row requests.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1).add_(1)
    values, ids = logprobs.topk(min(widest, logprobs.shape[1]), dim=-1)
    return LogprobColumns(token_ids, chosen.squeeze(1), ranks, ids, values)


def entries(columns: LogprobColumns, num_top: list[int]) -> list[TokenLogprobs]:
    """One entry per position, each with as many alternatives as requested."""
    rows = zip(*(column.tolist() for column in columns), num_top, strict=True)
    return [_entry(*row) for row in rows]


def _entry(
    token_id: int, logprob: float, rank: int, ids: list[int], values: list[float], count: int
) -> TokenLogprobs:
    ids, values = ids[:count], values[:count]
    if rank == 1 and ids and ids[0] != token_id:
        # A tie for first place: the sampled token is listed first.
        if token_id in ids:
            ids.remove(token_id)
        else:
            ids.pop()
        ids.insert(0, token_id)  # the tied values are equal, so they need not move
    return TokenLogprobs(
        token_id=token_id,
        logprob=logprob,
        rank=rank,
        top_ids=tuple(ids),
        top_logprobs=tuple(values),
    )

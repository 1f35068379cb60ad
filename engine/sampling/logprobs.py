"""Log-probabilities as they are told to clients."""

from __future__ import annotations

import torch

from engine.types import TokenLogprobs


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: list[int]
) -> list[TokenLogprobs]:
    """Log-probability and rank of a token of each row, and of the row's likeliest tokens.

    Of the raw distribution, by log_softmax in float32. A token's own value and its entry among
    the likeliest come from one tensor and are the same float.

    Args:
        logits: [n, vocab] float32, before temperature and anything else.
        token_ids: [n] int64.
        num_top: of each row, the alternatives asked for.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1).add_(1).tolist()
    widest = min(max(num_top, default=0), logprobs.shape[1])
    values, ids = logprobs.topk(widest, dim=-1)
    rows = zip(
        token_ids.tolist(),
        chosen.squeeze(1).tolist(),
        ranks,
        ids.tolist(),
        values.tolist(),
        num_top,
        strict=True,
    )
    return [_entry(*row) for row in rows]


def _entry(
    token_id: int, logprob: float, rank: int, ids: list[int], values: list[float], count: int
) -> TokenLogprobs:
    ids, values = ids[:count], values[:count]
    if rank == 1 and ids and ids[0] != token_id:
        # A tie for the first place: the one that was taken goes first.
        if token_id in ids:
            ids.remove(token_id)
        else:
            ids.pop()
        ids.insert(0, token_id)  # the tied values are equal, so they stay as they are
    return TokenLogprobs(
        token_id=token_id,
        logprob=logprob,
        rank=rank,
        top_ids=tuple(ids),
        top_logprobs=tuple(values),
    )

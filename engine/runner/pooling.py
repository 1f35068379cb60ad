"""Pool hidden states into the parts of vectors that a step's rows contribute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.plan_rows import ScheduledRow
from engine.pooling import PoolingKind
from engine.types import Request


@dataclass(frozen=True, slots=True)
class PooledRow:
    """One row's contribution to its request's vector, on the device."""

    id: str
    part: torch.Tensor  # [size] float32


def pool_rows(
    rows: Sequence[ScheduledRow],
    requests: Sequence[Request],
    query_start: Sequence[int],
    hidden: torch.Tensor,
    score: Callable[[torch.Tensor], torch.Tensor],
    *,
    scored: PoolingKind = "last",
) -> Iterator[PooledRow]:
    """Yield the contributions of rows whose requests ask for a vector; see the runner's row
    contract.

    Args:
        rows: of the step.
        requests: of the rows.
        query_start: each row's first token in the batch, and the end of the last row.
        hidden: [num_tokens, hidden_size] of all the step's tokens, after the final norm.
        score: the classification head: [n, hidden_size] -> [n, num_labels] float32; or that of
            the language model, for scores by tokens.
        scored: which hidden states it reads: those of rows that are whole, or the last one.
    """
    for index, (row, request) in enumerate(zip(rows, requests, strict=True)):
        params = request.pooling
        if params is None:
            continue
        begin, end = query_start[index], query_start[index + 1]
        holds_last = row.start + len(row.token_ids) == len(request.prompt_token_ids)
        if params.use_score_head:
            if holds_last:
                outputs = score(_scored(hidden[begin:end], scored))[0]
                yield PooledRow(row.id, _score_of(outputs, params.score_tokens))
        elif params.kind == "last":
            if holds_last:
                yield PooledRow(row.id, hidden[end - 1].float())
        elif params.kind == "cls":
            if row.start == 0:
                yield PooledRow(row.id, hidden[begin].float())
        elif params.kind == "mean":
            total = hidden[begin:end].sum(0, dtype=torch.float32)
            yield PooledRow(row.id, total / len(request.prompt_token_ids))
        else:
            yield PooledRow(row.id, hidden[begin:end].amax(0).float())


def _score_of(outputs: torch.Tensor, tokens: tuple[int, ...]) -> torch.Tensor:
    """Outputs of a head [n] -> what is returned of them; see ``PoolingParams.score_tokens``."""
    if not tokens:
        return outputs
    chosen = outputs[list(tokens)].float()
    return chosen[:1] if len(tokens) == 1 else chosen[:1] - chosen[1:]


def _scored(hidden: torch.Tensor, kind: PoolingKind) -> torch.Tensor:
    """[tokens, hidden_size] of a row -> [1, hidden_size] for the head, in the same dtype."""
    if kind == "mean":
        return hidden.mean(0, keepdim=True, dtype=torch.float32).to(hidden.dtype)
    assert kind in ("cls", "last")
    return hidden[:1] if kind == "cls" else hidden[-1:]

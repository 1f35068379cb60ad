"""Results for prompts: log-probabilities and vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.plan_rows import PlanRows
from engine.runner.inputs import HostBatch
from engine.runner.outcome import PromptLogprobRow
from engine.runner.pooling import PooledRow, pool_rows
from engine.runner.rows import RowTable
from engine.sampling.logprobs import logprob_columns
from kernels.transfer import to_device

# Prompt positions whose logits are computed at once: those of a long chunk would take gigabytes.
_LOGPROB_CHUNK_TOKENS = 128

Score = Callable[[torch.Tensor], torch.Tensor]  # hidden states to logits, or to a head's scores


class PromptResults(NamedTuple):
    """A step's results for prompts."""

    logprob_rows: list[PromptLogprobRow]
    pooled: list[PooledRow]


NO_PROMPT_RESULTS = PromptResults([], [])


def are_needed(batch: HostBatch, table: RowTable) -> bool:
    """Return whether a row has prompt results, for which all tokens' hidden states are needed."""
    return need_logprobs(batch, table) or _has_pooling(batch, table)


def compute(
    rows: PlanRows, batch: HostBatch, table: RowTable, hidden: torch.Tensor, score: Score
) -> PromptResults:
    """Compute the rows' prompt results from all hidden states, [num_tokens, hidden_size]."""
    judged = (
        _compute_prompt_logprobs(rows, batch, table, hidden, score)
        if need_logprobs(batch, table)
        else []
    )
    if not _has_pooling(batch, table):
        return PromptResults(judged, [])
    requests = [table.requests[slot] for slot in batch.slots.tolist()]
    bounds = batch.query_start.tolist()
    return PromptResults(judged, list(pool_rows(rows, requests, bounds, hidden, score)))


def need_logprobs(batch: HostBatch, table: RowTable) -> bool:
    """Return whether any row of the step returns log-probabilities of prompt tokens."""
    if not table.prompt_logprob_slots:
        return False
    starts = dict(zip(batch.slots.tolist(), batch.starts.tolist(), strict=True))
    lengths = {
        slot: len(table.requests[slot].prompt_token_ids) for slot in table.prompt_logprob_slots
    }
    return any(starts.get(slot, length) < length - 1 for slot, length in lengths.items())


def _has_pooling(batch: HostBatch, table: RowTable) -> bool:
    """Return whether any row adds to a vector."""
    return bool(table.pooling_slots) and not table.pooling_slots.isdisjoint(batch.slots.tolist())


def _compute_prompt_logprobs(
    rows: PlanRows, batch: HostBatch, table: RowTable, hidden: torch.Tensor, score: Score
) -> list[PromptLogprobRow]:
    """Compute the log-probabilities of prompt tokens for the rows that ask for them."""
    judged: list[PromptLogprobRow] = []
    for index, (row, slot) in enumerate(zip(rows, batch.slots.tolist(), strict=True)):
        request = table.requests[slot]
        num_top = request.sampling.prompt_logprobs
        if num_top is None or row.start >= len(request.prompt_token_ids) - 1:
            continue
        # The logits at position p judge the prompt's token p + 1; the last position judges none.
        prompt = request.prompt_token_ids
        token_ids = prompt[row.start + 1 : row.start + len(row.token_ids) + 1]
        begin = int(batch.query_start[index])
        columns = []
        for first in range(0, len(token_ids), _LOGPROB_CHUNK_TOKENS):
            ids = token_ids[first : first + _LOGPROB_CHUNK_TOKENS]
            logits = score(hidden[begin + first : begin + first + len(ids)])
            chosen = to_device(torch.tensor(ids), logits.device)
            columns.append(logprob_columns(logits, chosen, num_top))
        judged.append(PromptLogprobRow(row.id, num_top, columns))
    return judged

"""What a step produced: from tensors on the device to a ``StepResult``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from engine.errors import Failure
from engine.plan_rows import PlanRows
from engine.runner.drafts import StepDrafts
from engine.runner.pooling import PooledRow
from engine.runner.transfer import Downloads
from engine.sampling.logprobs import LogprobColumns, entries
from engine.types import StepResult, TokenLogprobs
from kernels.sampling import SamplerOutput

NOT_FINITE = Failure(
    kind="RequestFailed", message="the model's scores for this request are not finite"
)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Results of the sampling rows, on the device."""

    sampled: SamplerOutput
    logprob_rows: list[int] = field(default_factory=list)  # rows that return log-probabilities
    num_top: list[int] = field(default_factory=list)  # alternatives that each of these returns
    columns: LogprobColumns | None = None
    failures: dict[int, Failure] = field(default_factory=dict)  # of rows that can sample nothing
    # [G] int64, accepted drafts of each sequence, if drafts were verified
    num_accepted: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobRow:
    """Log-probabilities of a row's prompt tokens, on the device, in pieces."""

    id: str
    num_top: int
    columns: list[LogprobColumns]


class _SampledTokens(NamedTuple):
    """What the sampling rows produced, on the host, row by row."""

    token_ids: list[int]
    logprobs: list[tuple[TokenLogprobs, ...] | None]
    spans: list[tuple[int, int]]  # each sequence's rows, without its refused drafts


class Outcome:
    """A step's results on their way to the host.

    Args:
        rows: of the batch.
        sampling_rows: [S] rows that sample a token.
        sampled: the tokens sampled; None when there are none.
        prompt_logprob_rows: rows that return log-probabilities of their prompt.
        pooled: rows that add to a vector.
        downloads: of the device.
        drafts: those verified; None: there are none.
    """

    def __init__(
        self,
        rows: PlanRows,
        sampling_rows: np.ndarray,
        sampled: SampledRows | None,
        prompt_logprob_rows: list[PromptLogprobRow],
        pooled: list[PooledRow],
        downloads: Downloads,
        drafts: StepDrafts | None = None,
    ) -> None:
        self._drafts = drafts
        self._ids = rows.ids
        if sampling_rows.size != len(rows):
            self._ids = [rows.ids[row] for row in sampling_rows.tolist()]
        self._sampled = sampled
        self._prompt_logprob_rows = prompt_logprob_rows
        self._pooled = pooled
        tensors: list[torch.Tensor] = []
        if sampled is not None:
            tensors += sampled.sampled
            tensors += sampled.columns or ()
            if sampled.num_accepted is not None:
                tensors.append(sampled.num_accepted)
        for row in prompt_logprob_rows:
            for columns in row.columns:
                tensors += columns
        tensors += [row.part for row in pooled]
        self._fetched = downloads.fetch(tensors)

    def result(self) -> StepResult:
        """Wait for the device and return the result; a failed row appears in ``errors`` alone."""
        fetched = self._fetched.wait()
        if len(fetched) == len(SamplerOutput._fields) and self._sampled is not None:
            plain = self._plain_result(SamplerOutput(*fetched), self._sampled.failures)
            if plain is not None:
                return plain
        tensors = iter(fetched)
        errors: dict[str, Failure] = {}
        told = self._read_sampled(tensors, errors)
        prompt_logprobs = self._read_prompts(tensors, errors)
        pooled: dict[str, bytes] = {}
        for row in self._pooled:
            record_pooled(row.id, next(tensors), pooled, errors)
        good = [(begin, end) for begin, end in told.spans if self._ids[begin] not in errors]
        return StepResult(
            ids=tuple(self._ids[begin] for begin, _ in good),
            token_ids=tuple(tuple(told.token_ids[begin:end]) for begin, end in good),
            logprobs=tuple(_joined(told.logprobs[begin:end]) for begin, end in good),
            prompt_logprobs={k: v for k, v in prompt_logprobs.items() if k not in errors},
            pooled=pooled,
            errors=errors,
        )

    def _plain_result(
        self, sampled: SamplerOutput, failures: dict[int, Failure]
    ) -> StepResult | None:
        """Return the result of a step of one token a row and nothing else; None if a row failed."""
        count = len(self._ids)
        if failures or not sampled.is_finite[:count].all():
            return None
        token_ids = sampled.token_ids[:count].tolist()
        return StepResult(tuple(self._ids), tuple(zip(token_ids, strict=True)), (None,) * count)

    def _read_sampled(
        self, tensors: Iterator[torch.Tensor], errors: dict[str, Failure]
    ) -> _SampledTokens:
        """Read what the rows sampled, and record those that failed."""
        count = len(self._ids)
        told = _SampledTokens([], [None] * count, [(row, row + 1) for row in range(count)])
        if self._sampled is None:
            return told
        token_ids = next(tensors)[:count].tolist()
        is_finite = next(tensors)[:count].tolist()
        if self._sampled.columns is not None:
            reported = entries(_next_columns(tensors), self._sampled.num_top)
            for row, entry in zip(self._sampled.logprob_rows, reported, strict=True):
                told.logprobs[row] = (entry,)
        spans = told.spans
        if self._sampled.num_accepted is not None and self._drafts is not None:
            begins, accepted = self._drafts.group_starts.tolist(), next(tensors).tolist()
            spans = [(b, b + n + 1) for b, n in zip(begins, accepted, strict=True)]
        if not all(is_finite):
            broken = (begin for begin, end in spans if not all(is_finite[begin:end]))
            errors.update((self._ids[begin], NOT_FINITE) for begin in broken)
        for row, failure in self._sampled.failures.items():
            errors[self._ids[row]] = failure
        return told._replace(token_ids=token_ids, spans=spans)

    def _read_prompts(
        self, tensors: Iterator[torch.Tensor], errors: dict[str, Failure]
    ) -> dict[str, tuple[TokenLogprobs, ...]]:
        """Read the log-probabilities of prompts, and record those that are not finite."""
        found: dict[str, tuple[TokenLogprobs, ...]] = {}
        for row in self._prompt_logprob_rows:
            pieces = [_next_columns(tensors) for _ in row.columns]
            judged = [e for p in pieces for e in entries(p, [row.num_top] * len(p.token_ids))]
            if all(math.isfinite(entry.logprob) for entry in judged):
                found[row.id] = tuple(judged)
            else:
                errors[row.id] = NOT_FINITE
        return found


def _joined(
    logprobs: list[tuple[TokenLogprobs, ...] | None],
) -> tuple[TokenLogprobs, ...] | None:
    """Join the log-probabilities of one sequence's tokens: all of them have some, or none."""
    if logprobs[0] is None or len(logprobs) == 1:
        return logprobs[0]
    return tuple(entry for each in logprobs if each is not None for entry in each)


def record_pooled(
    row_id: str, part: torch.Tensor, pooled: dict[str, bytes], errors: dict[str, Failure]
) -> None:
    """Record a row's part of a vector, which is on the host, or a failure if it is not finite."""
    if part.isfinite().all():
        pooled[row_id] = part.numpy().astype("<f4", copy=False).tobytes()
    else:
        errors[row_id] = NOT_FINITE


def _next_columns(tensors: Iterator[torch.Tensor]) -> LogprobColumns:
    return LogprobColumns(*(next(tensors) for _ in LogprobColumns._fields))

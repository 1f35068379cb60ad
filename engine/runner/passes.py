"""Several passes of one step: what each of them computes, and what all of them tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from engine.runner.inputs import HostBatch
from engine.runner.outcome import Outcome
from engine.types import PENDING_TOKEN, StepResult


def later_passes(
    batch: HostBatch, num_passes: Mapping[int, int]
) -> Iterator[tuple[np.ndarray, HostBatch]]:
    """The passes behind the first: the places of their rows in it, and their batches.

    Args:
        batch: of the first pass, a token a row.
        num_passes: of the rows that have several, by place.
    """
    places = np.fromiter(num_passes.keys(), np.int32, len(num_passes))
    counts = np.fromiter(num_passes.values(), np.int32, len(num_passes))
    for nth in range(1, int(counts.max())):
        rows = np.sort(places[counts > nth])
        steps = np.arange(rows.size + 1, dtype=np.int32)
        yield (
            rows,
            HostBatch(
                slots=batch.slots[rows],
                query_start=steps,
                starts=batch.starts[rows] + np.int32(nth),
                token_ids=np.full(rows.size, PENDING_TOKEN, np.int32),
                sampling_rows=steps[:-1],
            ),
        )


class PassesOutcome:
    """The results of a step's passes, each on its way to the host; the first one first.

    Args:
        passes: what came of each.
        keeps_states: the model has a state of each row, which has made all passes.
    """

    def __init__(self, passes: Sequence[Outcome], *, keeps_states: bool = False) -> None:
        self._passes = passes
        self._keeps_states = keeps_states

    def result(self) -> StepResult:
        """Wait for all of them, and tell their tokens row by row.

        A row that fails in a later pass has had that many passes: what it does in the next step
        tells the failure. A row whose state is past that pass fails now.
        """
        first, *later = [each.result() for each in self._passes]
        tokens = dict(zip(first.ids, first.token_ids, strict=True))
        failed = set(first.errors)
        errors = dict(first.errors)
        for result in later:
            failed.update(result.errors)
            if self._keeps_states:
                errors |= result.errors
            for row_id, token_ids in zip(result.ids, result.token_ids, strict=True):
                if row_id not in failed:
                    tokens[row_id] += token_ids
        if len(errors) == len(first.errors):
            return msgspec.structs.replace(first, token_ids=tuple(tokens.values()))
        told = {row_id: ids for row_id, ids in tokens.items() if row_id not in errors}
        return msgspec.structs.replace(
            first,
            ids=tuple(told),
            token_ids=tuple(told.values()),
            logprobs=(None,) * len(told),  # rows with several passes are told without any
            errors=errors,
        )

"""Several passes in one step: the batch of each pass, and the merged result."""

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
    """Yield, for each pass after the first, its rows' places in the first one and its batch.

    Args:
        batch: of the first pass, one token a row.
        num_passes: of the rows with several passes, by place.
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


class MultiPassOutcome:
    """The results of a step's passes, in order, each on its way to the host.

    Args:
        passes: the outcome of each.
        is_recurrent: the model is recurrent; each row's state has been through all passes.
    """

    def __init__(self, passes: Sequence[Outcome], *, is_recurrent: bool = False) -> None:
        self._passes = passes
        self._is_recurrent = is_recurrent

    def result(self) -> StepResult:
        """Wait for all passes, and merge their tokens row by row.

        A row that fails in a later pass returns the tokens before it; the next step reports the
        failure, since it computes the same position again. A row whose recurrent state is already
        past that position fails now.
        """
        first, *later = [each.result() for each in self._passes]
        tokens = dict(zip(first.ids, first.token_ids, strict=True))
        failed = set(first.errors)
        errors = dict(first.errors)
        for result in later:
            failed.update(result.errors)
            if self._is_recurrent:
                errors |= result.errors
            for row_id, token_ids in zip(result.ids, result.token_ids, strict=True):
                if row_id not in failed:
                    tokens[row_id] += token_ids
        if len(errors) == len(first.errors):
            return msgspec.structs.replace(first, token_ids=tuple(tokens.values()))
        succeeded = {row_id: ids for row_id, ids in tokens.items() if row_id not in errors}
        return msgspec.structs.replace(
            first,
            ids=tuple(succeeded),
            token_ids=tuple(succeeded.values()),
            logprobs=(None,) * len(succeeded),  # rows with several passes never return any
            errors=errors,
        )

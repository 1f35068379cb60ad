"""Runs a failed step again so that only the rows that caused the failure fail.

When a runner raises, neither the row at fault nor the runner's progress is known. So the step is
run again in halves, and halves that raise are split further, down to single rows. A row that raises
alone fails; every other row gets the token that it would have got. This is sound because a row's
result depends only on the row, because writing the same keys and values twice changes nothing, and
because each part is a complete plan that introduces its rows anew (see the row contract in
``engine/runner/protocol.py``). If the model keeps recurrent states, the sequences' tokens are first
computed again from the start. ``k`` bad rows among ``n`` cost about ``2 k log2 n`` runs.

A step that only fails as a whole, because it did not fit into memory, thus becomes two that
succeed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engine.errors import EngineDead, Failure
from engine.plan_rows import ScheduledRow
from engine.runner.protocol import Runner
from engine.scheduler import Scheduler
from engine.types import StepPlan, StepResult, TokenLogprobs

logger = logging.getLogger(__name__)


def run_isolated(runner: Runner, scheduler: Scheduler, plan: StepPlan) -> StepResult:
    """The result of ``plan``, which has raised: errors for the failing rows, tokens for the others.

    No other step may be in flight, and the results of earlier plans have been processed.

    Raises:
        EngineDead: the runner reports that no later step can work either.
    """
    _repeat_loads(runner, scheduler.mark_failed())
    middle = len(plan.rows) // 2
    stack: list[Sequence[ScheduledRow]] = [plan.rows[middle:], plan.rows[:middle]]
    results: list[StepResult] = []
    errors: dict[str, Failure] = {}
    while stack:
        rows = stack.pop()
        if not rows:
            continue
        try:
            *before, part = scheduler.replay(plan, rows)
            for lead in before:
                runner.launch(lead).result()
            results.append(runner.launch(part).result())
        except EngineDead:
            raise
        except Exception as error:
            if len(rows) > 1:
                middle = len(rows) // 2
                stack += (rows[middle:], rows[:middle])
                continue
            logger.error("request %s failed: %s: %s", rows[0].id, type(error).__name__, error)
            errors[rows[0].id] = Failure.of(error)
    return _merge(results, errors)


def _repeat_loads(runner: Runner, plan: StepPlan) -> None:
    """Repeat the plan's loads from the host: rows of other plans may hold the loaded blocks."""
    if plan.is_empty:
        return
    try:
        runner.launch(plan).result()
    except EngineDead:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise EngineDead(f"blocks cannot be copied from the host: {reason}") from error


def _merge(results: Sequence[StepResult], errors: dict[str, Failure]) -> StepResult:
    ids: list[str] = []
    token_ids: list[tuple[int, ...]] = []
    logprobs: list[tuple[TokenLogprobs, ...] | None] = []
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
    pooled: dict[str, bytes] = {}
    for result in results:
        ids += result.ids
        token_ids += result.token_ids
        logprobs += result.logprobs or (None,) * len(result.ids)
        prompt_logprobs |= result.prompt_logprobs
        pooled |= result.pooled
        errors |= result.errors
    return StepResult(
        ids=tuple(ids),
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        prompt_logprobs=prompt_logprobs,
        pooled=pooled,
        errors=errors,
    )

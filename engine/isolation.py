"""Running a step so that a fault costs only the rows that cause it.

When a runner raises, nothing says which row was to blame, and nothing is known of how far it
came. Halves of the step are run again, and halves of the halves that raise, down to single rows:
a row that raises on its own fails, every other row gets the token it would have got. That is so
because a row's result depends on the row alone, because writing keys and values twice changes
nothing, and because each part is a whole plan that reintroduces its rows (see the row contract in
``engine/runner/protocol.py``), behind the sequence's tokens from the first one on where the model
keeps a state of it. ``k`` bad rows among ``n`` cost about ``2 k log2 n`` runs.

A step that only fails as a whole (it did not fit the memory) thus becomes two that succeed.
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
    """The result of ``plan``, which has raised: its failing rows are errors in it.

    Nothing else is under way, and the results of earlier plans have been taken in.

    Raises:
        EngineDead: the runner says that no later step can work either.
    """
    _load_again(runner, scheduler.fail())
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


def _load_again(runner: Runner, plan: StepPlan) -> None:
    """Blocks that come from the host may be held by others than the rows that are to blame."""
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

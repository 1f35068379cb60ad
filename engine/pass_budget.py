"""How many passes a step may make (``engine/scheduler/passes.py``), so that steps stay short.

A new arrival waits for the current step to end, half a step on average, and all tokens of a step
are delivered at once. A step should therefore last no longer than one screen refresh, so that text
still seems to appear token by token. With many rows, one pass takes a good part of that time, and
delivering a step's tokens takes a good part of a core, so their steps last two refreshes.
"""

from __future__ import annotations

from engine.plan_rows import PlanRows
from engine.speculation.costs import MedianEstimate, row_bucket
from engine.types import StepResult

# Target duration of a step with several passes; rounding exceeds it by at most a third.
_STEP_S = 0.016
_LARGE_BATCH_STEP_S = 0.032
_LARGE_BATCH = 48  # rows


class PassBudget:
    """Learns how long a pass takes, for each number of rows.

    Args:
        max_passes: the maximum number of passes in a step.
    """

    def __init__(self, max_passes: int) -> None:
        self._max_passes = max_passes
        # Seconds per pass, by approximate number of rows.
        self._pass_times: dict[int, MedianEstimate] = {}

    def max_passes(self, num_rows: int) -> int:
        """Passes for a step of ``num_rows`` rows; 1 until the duration of a pass is known."""
        usual = self._pass_times.get(row_bucket(num_rows))
        if usual is None or not usual.is_known:
            return 1
        step_s = _STEP_S if num_rows < _LARGE_BATCH else _LARGE_BATCH_STEP_S
        if usual.value * self._max_passes <= step_s:
            return self._max_passes
        return max(1, round(step_s / usual.value))

    def observe(self, rows: PlanRows, result: StepResult, seconds: float) -> None:
        """Learn from the duration of a step; steps with prompts say nothing about a pass."""
        num_rows = len(rows)
        if self._max_passes == 1 or not num_rows:
            return
        if rows.unsampled or not result.token_ids:
            return
        if max(map(len, rows.token_ids)) > 1:
            return
        usual = self._pass_times.get(row_bucket(num_rows))
        if usual is None:
            usual = self._pass_times[row_bucket(num_rows)] = MedianEstimate()
        usual.learn(seconds / max(map(len, result.token_ids)))

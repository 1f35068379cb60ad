"""The batching window: prompts that arrive within a moment of each other start together."""

from __future__ import annotations

from engine.config import SchedulerConfig
from engine.scheduler import Scheduler


class BatchingWindow:
    """Holds new prompts back for a moment, so that they start together in a larger step.

    The window opens when the queue becomes non-empty. It closes after ``batching_window_ms``, or as
    soon as enough prompts or tokens wait. Running sequences are not held back.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._length_s = config.batching_window_ms / 1000.0
        self._max_prompts = config.batching_window_prompts or config.max_num_seqs
        self._max_tokens = config.batching_window_tokens or config.step_tokens
        self._closes_s: float | None = None

    def remaining_s(self, scheduler: Scheduler, now_s: float) -> float:
        """Seconds until waiting prompts may be admitted; 0 if they may be now."""
        if not self._length_s:
            return 0.0
        if not scheduler.num_waiting:
            return 0.0
        if self._closes_s is None:
            self._closes_s = now_s + self._length_s
        if scheduler.num_waiting >= self._max_prompts:
            return 0.0
        if scheduler.num_waiting_tokens >= self._max_tokens:
            return 0.0
        return max(0.0, self._closes_s - now_s)

    def close(self) -> None:
        """Close the window, since nothing waits; the next arrival opens it again."""
        self._closes_s = None

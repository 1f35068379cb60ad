"""How many passes a step may make (``engine/scheduler/passes.py``): as many as are soon done.

Who comes while a step runs waits for its end, half of a step on average, and all tokens of a step
are told at once. So it should not last longer than a picture on a screen: what it tells then looks
as if it came one by one. Where many run, a pass alone takes a good part of that, and telling of a
step's tokens a good part of a core: steps of theirs last two pictures.

Steps of a crowd (``engine/crowd.py``) make one pass: a core beside the engine's tells of their
tokens while the next step is computed, so several passes would save next to nothing, and texts that
end in the middle of them would wait.
"""

from __future__ import annotations

from engine.crowd import are_many, is_crowd
from engine.plan_rows import PlanRows
from engine.speculation.costs import Usual, alike
from engine.types import StepResult

# That a step of several passes should last; rounding makes it 4/3 of that at most.
_STEP_S = 0.016
_STEP_OF_MANY_S = 0.032


class PassPace:
    """Learns what a pass takes, for each number of rows.

    Args:
        most: passes of a step, however soon they are done.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._usual: dict[int, Usual] = {}  # seconds of a pass, by about so many rows

    def most(self, num_rows: int) -> int:
        """Passes of a step of so many rows; one until it is known what a pass takes."""
        if is_crowd(num_rows):
            return 1
        usual = self._usual.get(alike(num_rows))
        if usual is None or not usual.is_known:
            return 1
        step_s = _STEP_OF_MANY_S if are_many(num_rows) else _STEP_S
        if usual.value * self._most <= step_s:
            return self._most
        return max(1, round(step_s / usual.value))

    def observe(self, rows: PlanRows, result: StepResult, seconds: float) -> None:
        """A step took so long. Those that compute prompts say nothing of what a pass takes, and of
        a crowd's nobody asks."""
        num_rows = len(rows)
        if self._most == 1 or not num_rows or is_crowd(num_rows):
            return
        if rows.silent or not result.token_ids:
            return
        if max(map(len, rows.token_ids)) > 1:
            return
        usual = self._usual.get(alike(num_rows))
        if usual is None:
            usual = self._usual[alike(num_rows)] = Usual()
        usual.learn(seconds / max(map(len, result.token_ids)))

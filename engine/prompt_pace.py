"""How many tokens of prompts a step on a CPU computes beside those who decode: what is soon done.

Who decodes waits for the step's end, so the gap between two tokens of a text is as long as a step
with prompts in it. What a step can take is a matter of the machine, the model, the length of the
context, and of whoever else has the machine at the moment; so it is learnt from the steps.

A step of n tokens takes about a + b n seconds. The next one is given as many tokens as the last
rate allows, n' = n T / (a + b n) for a step of T seconds. That leads to the n at which a step takes
T, wherever it begins, because the fixed part is the smaller one: near that n an error shrinks by
a / T from step to step.
"""

from __future__ import annotations

from engine.config import LEAST_PROMPT_TOKENS, SchedulerConfig
from engine.plan_rows import PlanRows
from engine.speculation.costs import Usual

# That a step with prompts should last: text in larger jumps is unpleasant to read. Short ones cost
# next to nothing, as whoever decodes goes on in each of them.
_STEP_S = 0.2
_GRAIN = 16  # tokens of prompts come in multiples of it, as blocks of the cache do


class PromptPace:
    """Learns what a step takes for each token.

    Args:
        limits: of the engine. Where steps do not fit who runs, as on a GPU, there is nothing to do.
    """

    def __init__(self, limits: SchedulerConfig) -> None:
        self._is_on = limits.fits_running
        self._limits = limits
        self._usual = Usual()  # seconds a token

    def most(self, num_running: int) -> int | None:
        """Tokens of prompts in a step of so many sequences, of which some decode; None: as many as
        it has room for. Never so few that prompts would not go on."""
        if not self._usual.is_known:
            return None
        tokens = int(_STEP_S / self._usual.value) - num_running
        return max(LEAST_PROMPT_TOKENS, tokens // _GRAIN * _GRAIN)

    def observe(self, rows: PlanRows, seconds: float) -> None:
        """A step took so long. Those of few tokens say little of what another token takes."""
        if not self._is_on:
            return
        num_tokens = rows.num_tokens
        num_prompts = num_tokens - len(rows) - sum(rows.num_drafts.values())
        room = self._limits.step_budget(len(rows))
        if 2 * num_prompts >= min(room, self.most(len(rows)) or room):
            self._usual.learn(max(seconds, 1e-9) / num_tokens)

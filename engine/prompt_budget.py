"""How many prompt tokens a step may compute beside decoding sequences.

Decoding sequences wait for the step to end, so a step with prompts makes a gap in their texts. How
many tokens a step can take depends on the machine, the model, the context length and the machine's
other load, so it is learnt from the steps.

A step of n tokens takes about a + b n seconds. The next step gets as many tokens as the last rate
allows: n' = n T / (a + b n) for a target duration of T seconds. From any start this converges to
the n whose step takes T, because the fixed part is the smaller one: near that n an error shrinks by
a / T per step.
"""

from __future__ import annotations

from engine.config import MIN_PROMPT_TOKENS, SchedulerConfig
from engine.plan_rows import PlanRows
from engine.speculation.costs import MedianEstimate

_TOKEN_MULTIPLE = 16  # prompt tokens are rounded to a multiple of this, which suits the block size


class PromptBudget:
    """Learns how long a step takes per token.

    Args:
        limits: of the engine; ``prompt_step_s`` is the target duration, or None for no limit.
    """

    def __init__(self, limits: SchedulerConfig) -> None:
        self._step_s = limits.prompt_step_s
        self._limits = limits
        self._token_time = MedianEstimate()  # seconds per token

    def max_prompt_tokens(self, num_running: int) -> int | None:
        """Most prompt tokens in a step of ``num_running`` sequences, some of which decode.

        None: no limit besides the step's own. Never so few that prompts would make no progress.
        """
        if self._step_s is None or not self._token_time.is_known:
            return None
        tokens = int(self._step_s / self._token_time.value) - num_running
        return max(MIN_PROMPT_TOKENS, tokens // _TOKEN_MULTIPLE * _TOKEN_MULTIPLE)

    def observe(self, rows: PlanRows, seconds: float) -> None:
        """Learn from the duration of a step, unless it has so few tokens that it says little."""
        if self._step_s is None:
            return
        num_tokens = rows.num_tokens
        num_prompts = num_tokens - len(rows) - sum(rows.num_drafts.values())
        room = self._limits.step_budget(len(rows))
        if 2 * num_prompts >= min(room, self.max_prompt_tokens(len(rows)) or room):
            self._token_time.learn(max(seconds, 1e-9) / num_tokens)

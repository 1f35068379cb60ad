"""Random behaviour of an engine's collaborators in a life of ``lives.py``."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.plan_rows import PlanRows, ScheduledRow
from engine.speculation.proposer import Drafter
from engine.types import EngineInfo, Request, StepResult
from tests.engine.fakes import VOCAB, FakeRunner, expected_output
from tests.engine.running import Guesser

if TYPE_CHECKING:
    from tests.engine.scheduler.lives import Life


class Guesses:
    """A proposer that knows the future output and proposes it most of the time."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def begin(self, request: Request) -> Drafter:
        text = [*request.prompt_token_ids, *expected_output(request, self._life.limit)[0]]
        return Guesser(text, self._life.rng, wrong=range(VOCAB))

    def finish(self, request: Request, token_ids: list[int]) -> None:
        pass


class Lazy(FakeRunner):
    """A runner that does not always make all of a row's passes."""

    def __init__(self, info: EngineInfo, rng: random.Random) -> None:
        super().__init__(info)
        self._rng = rng

    def num_made(self, planned: ScheduledRow) -> int:
        if self._rng.random() < 0.7:
            return planned.num_passes
        return self._rng.randint(1, planned.num_passes)


@dataclass
class RandomPassBudget:
    """A random limit on passes."""

    life: Life

    def max_passes(self, num_rows: int) -> int:
        return self.life.rng.randint(1, self.life.max_passes)

    def observe(self, rows: PlanRows, result: StepResult, seconds: float) -> None:
        pass


@dataclass
class RandomPromptBudget:
    """A random limit on the prompt tokens of a step."""

    life: Life

    def max_prompt_tokens(self, num_running: int) -> int | None:
        self.life.max_prompt_tokens = self.life.rng.choice((None, 1, 2, 5, 20))
        return self.life.max_prompt_tokens

    def observe(self, rows: PlanRows, seconds: float) -> None:
        pass


@dataclass
class Whim:
    """A batching window that is open at random."""

    life: Life

    def remaining_s(self, *_: object) -> float:
        return 0.0 if self.life.admits else 1.0

    def close(self) -> None:
        pass

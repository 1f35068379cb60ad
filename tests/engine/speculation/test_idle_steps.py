"""Steps without due drafts cost nothing, and no text waits long for a draft because of that."""

from __future__ import annotations

import random

from engine.config import SpeculationConfig
from engine.plan_rows import PlanRows, ScheduledRow
from engine.speculation.speculator import DraftState, Speculator
from engine.types import Request, StepPlan

STEP_S = 6e-4


class _Life:
    """One request's steps, planned and observed as by the scheduler; all drafts are accepted."""

    def __init__(self, step_s: float = STEP_S) -> None:
        self.step_s = step_s
        self.speculator = Speculator(SpeculationConfig(method="ngram"))
        self.num_asked = 0  # steps in which more was computed than whether any text is due
        self.num_drafted = 0
        self.begin([1])

    def begin(self, text: list[int]) -> None:
        self.request = Request(id="r", prompt_token_ids=tuple(text))
        self.text = list(text)
        self.draft: DraftState = self.speculator.begin(self.request)

    def step(self, token: int) -> bool:
        """Append a token; returns whether there were drafts."""
        speculator, text = self.speculator, self.text
        rows = PlanRows.of([ScheduledRow("r", len(text) - 1, (text[-1],), (), True)])
        drafts: tuple[int, ...] = ()
        if not speculator.try_skip_step(1):
            self.num_asked += 1
            if speculator.begin_step(1):
                if not speculator.tokens_until_due(self.draft, len(text)):
                    drafts = speculator.propose(self.draft, text, 4)
                rest = speculator.tokens_until_due(self.draft, len(text))
                speculator.end_step(0 if drafts else max(0, rest - 1))
        if drafts:
            rows.append_drafts(0, drafts, (), text)
            speculator.record_acceptance(self.draft, len(drafts), len(drafts))
        speculator.observe(StepPlan(rows=rows), self.step_s * (1 + 0.05 * len(drafts)))
        text.append(token)
        return bool(drafts)


def test_a_text_in_which_nothing_repeats_is_seldom_asked_for():
    """In a short step, the lookup alone costs some percent."""
    life = _Life()
    for token in range(2, 1002):
        life.step(token)
    assert 10 < life.num_asked < 100  # of 1,000, and it keeps trying


def test_a_text_of_long_steps_is_asked_for_often():
    """There a lookup costs next to nothing, and may gain a lot."""
    life = _Life(step_s=0.05)
    for token in range(2, 1002):
        life.step(token)
    assert life.num_asked > 900


def test_a_text_that_begins_to_repeat_itself_is_seen_to_soon():
    life, rng = _Life(), random.Random(1)
    for token in range(2, 302):
        life.step(token)
    cycle = [rng.randrange(1000) for _ in range(40)]
    drafted = [life.step(token) for token in cycle * 4]
    assert not any(drafted[:40])
    assert any(drafted[40:120])
    assert sum(drafted[120:]) > 30


def test_who_comes_next_is_not_passed_by():
    """Neither in the slot of a request that has ended, nor beside one that continues."""
    life = _Life()
    for token in range(2, 302):
        life.step(token)
    while not life.speculator.try_skip_step(1):
        life.step(len(life.text))
    assert not life.speculator.try_skip_step(2)
    assert life.speculator.try_skip_step(1)
    life.speculator.finish(life.request, life.text)
    assert not life.speculator.try_skip_step(1)

"""Losses are bounded even if drafts disappoint all expectations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.config import SpeculationConfig
from engine.plan_rows import PlanRows, ScheduledRow
from engine.speculation.draft_length import DraftLengthController
from engine.speculation.loss_budget import LossBudget
from engine.speculation.speculator import DraftState, Speculator
from engine.types import Request, StepPlan

NUM_ROWS, PLAIN_S = 64, 4e-3


@pytest.mark.parametrize("num_rows", [1, NUM_ROWS])
def test_what_drafts_lose_against_all_expectation_is_bounded(num_rows):
    """Few drafts seem free; none is ever accepted, though each row expects its own to be."""
    pace, lost = DraftLengthController(4), 0.0
    for _ in range(4000):
        is_trial = pace.begin_step(num_rows) and pace.is_trial
        num_drafts = sum(pace.take_drafts(0.95) for _ in range(num_rows))
        step_s = PLAIN_S * (1 + 0.1 * (num_drafts > 0))
        pace.observe(num_rows, num_drafts, step_s, num_tokens=num_rows, is_trial=is_trial)
        lost += step_s / PLAIN_S - 1
    assert 0 < lost < 0.005 * 4000 + 2.0


def test_past_gains_pay_for_a_while():
    """A text that changes its nature is not given up at once, nor drafted for in vain for long."""
    ledger = LossBudget()
    for _ in range(1000):
        ledger.record(1.0)
    num_lost = 0
    while not ledger.is_exhausted:
        ledger.record(-0.1)
        num_lost += 1
    assert 50 < num_lost < 150


def test_first_drafts_tell_what_drafts_cost_however_long_the_texts_are():
    """Texts are only indexed when n-grams are looked up: otherwise each step would be a trial."""
    speculator = Speculator(SpeculationConfig(method="ngram"))
    request = Request(id="r", prompt_token_ids=(1, 2, 3) * 40)
    text = list(request.prompt_token_ids)
    draft, num_trials, num_drafted = speculator.begin(request), 0, 0
    for _ in range(300):
        rows = PlanRows.of([ScheduledRow("r", len(text) - 1, (text[-1],), (), True)])
        if speculator.begin_step(1):
            num_trials += speculator._length_controller.is_trial
            drafts = speculator.propose(draft, text, 4)
            rows.append_drafts(0, drafts, ())
            speculator.record_acceptance(draft, len(drafts), len(drafts))
            num_drafted += 1
        speculator.observe(StepPlan(rows=rows), PLAIN_S * (1 + 0.1 * rows.num_drafts.get(0, 0)))
        text += [1, 2, 3] * 10  # more than a draft model would read unprompted
    assert 0 < num_trials < 8
    assert num_drafted > 280


class _InVain:
    """A proposer that never finds anything; counts its lookups and their tokens."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.seconds = 0.0

    def begin(self, request: Request) -> _InVain:
        return self

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        self.num_looks += 1
        return ()

    def lookup_cost_s(self, num_unseen: int) -> float:
        told = 1e-5 + 1e-6 * num_unseen
        self.seconds += told
        return told

    def finish(self, request: Request, token_ids: Sequence[int]) -> None:
        pass


def _lives(proposer: _InVain, num_steps: int, num_prompt: int) -> None:
    """Steps with several rows, planned and observed as by the scheduler."""
    speculator = Speculator(SpeculationConfig(method="ngram"), proposer)
    request = Request(id="r", prompt_token_ids=(1,) * num_prompt)
    texts = [[1] * num_prompt for _ in range(NUM_ROWS)]
    drafts: list[DraftState] = [speculator.begin(request) for _ in texts]
    for _ in range(num_steps):
        rows = PlanRows.of(ScheduledRow("r", len(text) - 1, (1,), (), True) for text in texts)
        if not speculator.try_skip_step(NUM_ROWS) and speculator.begin_step(NUM_ROWS):
            for draft, text in zip(drafts, texts, strict=True):
                if not speculator.tokens_until_due(draft, len(text)):
                    speculator.propose(draft, text, 4)
            rests = [
                speculator.tokens_until_due(*each)
                for each in zip(drafts, map(len, texts), strict=True)
            ]
            speculator.end_step(max(0, min(rests) - 1))
        speculator.observe(StepPlan(rows=rows), PLAIN_S)
        for text in texts:
            text.append(1)


@pytest.mark.parametrize("num_prompt", [20, 3000])
def test_looking_in_vain_costs_a_small_share_of_the_time(num_prompt):
    proposer, num_steps = _InVain(), 3000
    _lives(proposer, num_steps, num_prompt)
    one_look_s = 1e-5 + 1e-6 * (num_prompt + num_steps)
    assert proposer.num_looks > NUM_ROWS  # it keeps trying
    assert proposer.seconds < 0.006 * num_steps * PLAIN_S + PLAIN_S + one_look_s

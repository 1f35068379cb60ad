"""As many drafts as pay off, by measured costs and acceptance."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import pytest

from engine.speculation.draft_length import Acceptance, DraftLengthController, prior_acceptance

MOST = 4


class Outcome(NamedTuple):
    rate: float  # tokens per second relative to no drafts
    lengths: Counter[int]  # how often rows had each number of drafts


def live(num_rows: int, plain_s: float, draft_s: float, kept: list[float], **chance) -> Outcome:
    """Simulate a few hundred steps of rows with these acceptance probabilities."""
    noise, num_steps = chance.get("noise", 0.0), chance.get("num_steps", 600)
    rng, pace, of_all = random.Random(5), DraftLengthController(MOST), prior_acceptance()
    acceptances = [Acceptance(of_all, 2.0, 0.9) for _ in range(num_rows)]
    seconds = plain_seconds = 0.0
    num_tokens, lengths = 0, Counter[int]()
    for _ in range(num_steps):
        is_trial = pace.begin_step(num_rows) and pace.is_trial
        counts = [pace.take_drafts(acceptance.rate) for acceptance in acceptances]
        disturbed = 1 + noise * rng.random()
        step_s = (plain_s + draft_s * sum(counts)) * disturbed
        seconds += step_s
        before = num_tokens
        plain_seconds += plain_s * disturbed
        for count, acceptance, share in zip(counts, acceptances, kept, strict=True):
            accepted = 0
            while accepted < count and rng.random() < share:
                accepted += 1
            num_tokens += accepted + 1
            lengths[count] += 1
            if count:
                acceptance.learn(count, accepted)
                of_all.learn(count, accepted)
            else:
                acceptance.fade()
                of_all.fade()
        told = num_tokens - before
        pace.observe(num_rows, sum(counts), step_s, num_tokens=told, is_trial=is_trial)
    return Outcome(num_tokens / (num_rows * num_steps) * plain_seconds / seconds, lengths)


@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_cheap_drafts_that_are_kept_are_many(noise):
    outcome = live(1, 4e-3, 2e-4, [0.9], noise=noise)
    assert outcome.lengths.most_common(1)[0][0] == MOST
    assert outcome.rate > 2.8  # E(4) = 4.1 tokens, for 1.2 times the step


@pytest.mark.parametrize("noise", [0.0, 0.4])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_nothing_is_lost_where_drafts_cost_as_much_as_tokens(share, noise):
    outcome = live(64, 6.4e-3, 1.2e-4, [share] * 64, noise=noise)
    assert outcome.rate > 0.97
    assert outcome.lengths[0] > 0.95 * outcome.lengths.total()


def test_each_request_has_its_own_number():
    """A row whose drafts are always accepted gets many; one whose never are gets few."""
    outcome = live(2, 4e-3, 6e-4, [1.0, 0.0])
    assert outcome.lengths[MOST] > 450
    assert outcome.lengths[0] > 450
    assert outcome.rate > 1.5


def test_drafts_that_are_never_kept_cost_little():
    assert live(1, 4e-3, 4e-4, [0.0]).rate > 0.96


def test_what_has_become_cheap_is_found_out():
    pace, acceptance = DraftLengthController(MOST), Acceptance(0.9, 2.0, 0.9)
    asked = []
    for step in range(6000):
        is_trial = pace.begin_step(8) and pace.is_trial
        asked.append(pace.num_drafts(acceptance.rate))
        per_draft_s = 5e-4 if step < 2000 else 1e-5
        step_s = 4e-3 + per_draft_s * asked[-1] * 8
        told = 8 + 4 * asked[-1]  # half of them are accepted
        pace.observe(8, asked[-1] * 8, step_s, num_tokens=told, is_trial=is_trial)
    assert sum(asked[500:2000]) < 30
    assert sum(asked[5500:]) > 3.5 * 500


@pytest.mark.parametrize(("num_rows", "draft_s"), [(64, 2e-4), (64, 2e-3), (16, 1e-2)])
def test_what_learning_costs_is_a_small_share_of_the_time(num_rows, draft_s):
    """However expensive drafts are: no second full second is spent on useless drafts."""
    pace, plain_s = DraftLengthController(MOST), 5e-3
    lost_s = seconds = 0.0
    for _ in range(20_000):
        is_trial = pace.begin_step(num_rows) and pace.is_trial
        num_drafts = sum(pace.take_drafts(0.9) for _ in range(num_rows)) if is_trial else 0
        step_s = plain_s + num_drafts * draft_s
        pace.observe(num_rows, num_drafts, step_s, num_tokens=num_rows, is_trial=is_trial)
        seconds += step_s
        lost_s += step_s - plain_s
    of_one_trial_s = 3 * 8 * MOST * draft_s
    assert 0 < lost_s < 0.006 * seconds + 3 * of_one_trial_s


def test_other_numbers_of_rows_begin_with_what_is_known():
    """Two steps to measure the cost without drafts, and no trial."""
    pace = DraftLengthController(MOST)
    for num_rows in (4, 3, 2, 1):
        for step in range(12):
            is_trial = pace.begin_step(num_rows) and pace.is_trial
            count = pace.take_drafts(0.95)
            assert not is_trial or num_rows == 4
            if num_rows < 4:
                assert count == (MOST if step >= 2 else 0)
            num_drafts = count * num_rows
            told = {"num_tokens": num_rows + num_drafts, "is_trial": is_trial}
            pace.observe(num_rows, num_drafts, 4e-3 + 1e-4 * num_drafts, **told)


def test_a_hiccup_at_the_start_is_not_believed():
    """The very first steps are cold: ten times as slow as usual."""
    pace = DraftLengthController(MOST)
    for step in range(8):
        is_trial = pace.begin_step(1) and pace.is_trial
        count = pace.take_drafts(0.9)
        seconds = (1e-3 + 1e-4 * count) * (10 if step in (0, 2) else 1)
        pace.observe(1, count, seconds, num_tokens=1 + count, is_trial=is_trial)
    pace.begin_step(1)
    assert pace.num_drafts(0.9) == MOST


def test_reading_up_on_a_text_must_pay_too():
    """Drafts that gain a tenth do not pay for a read that takes as long as the rest of the text."""
    pace = DraftLengthController(MOST)
    for _ in range(12):
        is_trial = pace.begin_step(8) and pace.is_trial
        count = pace.take_drafts(0.9)
        told = {"num_tokens": 8 + 8 * count, "is_trial": is_trial}
        pace.observe(8, 8 * count, 8e-3 + 8 * count * 6e-4, **told)
    pace.begin_step(8)
    assert pace.num_drafts(0.9) > 0
    assert pace.num_drafts(0.9, read_s=1e-5) > 0
    assert pace.num_drafts(0.9, read_s=1e-3) == 0


def test_always_the_most_where_it_is_asked_for():
    pace = DraftLengthController(3, adaptive=False)
    pace.begin_step(500)
    pace.observe(500, 1500, 10.0)
    assert pace.num_drafts(0.01) == 3


def test_acceptance_returns_to_what_others_show():
    others = Acceptance(0.5, 1.0, 0.99)
    own = Acceptance(others, 2.0, 0.9)
    for _ in range(20):
        own.learn(4, 0)
    assert own.rate < 0.12
    for _ in range(200):
        own.fade()
    assert own.rate == pytest.approx(others.rate, abs=0.05)

"""Acceptance by draft position: learned from rows, and used to limit drafts."""

from __future__ import annotations

import random

import pytest

from engine.speculation.draft_length import DraftLengthController
from engine.speculation.position_factors import PositionFactors

FALLING = [0.9, 0.3, 0.2, 0.1]


def learn(rates: list[float], num_rows: int = 4000) -> tuple[PositionFactors, float]:
    """Learn from rows of four drafts with these acceptance rates; also returns the overall rate."""
    rng, positions, num_judged, num_kept = random.Random(2), PositionFactors(4), 0, 0
    for _ in range(num_rows):
        accepted = 0
        while accepted < 4 and rng.random() < rates[accepted]:
            accepted += 1
        positions.learn(4, accepted)
        num_judged += min(accepted + 1, 4)
        num_kept += accepted
    return positions, num_kept / num_judged


def test_the_rates_of_places_are_learnt():
    positions, mean = learn(FALLING)
    rates = [mean * factor for factor in positions.factors]
    assert rates[:2] == pytest.approx(FALLING[:2], abs=0.1)
    assert rates[2] < 0.4  # few observations
    flat, mean = learn([0.7] * 4)
    assert [mean * factor for factor in flat.factors] == pytest.approx([0.7] * 4, abs=0.12)


def test_a_place_that_was_never_judged_is_as_the_others():
    positions = PositionFactors(3)
    assert positions.factors == [1.0, 1.0, 1.0]
    for _ in range(300):
        positions.learn(1, 1)
    assert positions.factors == pytest.approx([1.0, 1.0, 1.0], abs=0.02)


def test_drafts_that_are_seldom_kept_behind_one_that_is_are_not_made():
    """One rate for all positions would overestimate the second and underestimate the first."""
    positions, mean = learn(FALLING)
    pace = DraftLengthController(4)
    for _ in range(20):
        is_trial = pace.begin_step(1) and pace.is_trial
        count = pace.take_drafts(0.9)
        told = {"num_tokens": 1 + count, "is_trial": is_trial}
        pace.observe(1, count, 10e-3 + 2e-3 * count, **told)
    pace.begin_step(1)
    assert pace.num_drafts(mean, positions.factors) == 1
    assert pace.num_drafts(0.9) > 2
    assert pace.num_drafts(mean) == 2

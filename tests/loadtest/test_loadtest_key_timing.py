"""The timing test of key rejections: its statistics, and a short run."""

from __future__ import annotations

import json
import random

import pytest

from loadtest.key_timing import _trim_slowest, main, welch_t


def test_welch_t_is_that_of_the_formula() -> None:
    # Means 2 and 4, variances 1 and 4: -2 / sqrt(1/3 + 4/3).
    assert welch_t([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]) == pytest.approx(-1.5492, abs=1e-4)


def test_a_difference_of_a_hundredth_shows_in_many_trials() -> None:
    rng = random.Random(0)
    near, far = ([rng.gauss(mean, 10.0) for _ in range(25_000)] for mean in (100.0, 101.0))
    assert abs(welch_t(near, far)) > 4.5
    assert abs(welch_t(near[::2], near[1::2])) < 4.5


def test_the_slowest_of_both_are_cut_off_together() -> None:
    near, far = _trim_slowest([1.0] * 90 + [50.0] * 10, [1.0] * 100)
    assert max(near + far) == 1.0


@pytest.mark.slow
def test_from_flags_to_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--trials", "40"])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["trials"] == 40
    assert told["median_near_us"] > 0

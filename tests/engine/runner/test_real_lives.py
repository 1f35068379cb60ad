"""Where features meet: any mix of them leaves every text as it is without them."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest

from engine.runner.verification import Verifier
from tests.engine.runner.real_lives import lives


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(
    "seeds", [range(7), pytest.param(range(7, 300), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_no_mix_of_features_changes_a_text(
    seeds: range,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    seen: Counter[str] = Counter()
    for life in lives(seeds, directory, monkeypatch):
        seen += life.seen
    events = ("texts", "drafts", "accepted", "preempted", "hits", "restores", "faults", "deaths")
    assert all(seen[event] for event in events), seen


def test_penalties_that_do_not_count_accepted_drafts_are_noticed(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(Verifier, "_count", lambda *_: None)
    with pytest.raises(AssertionError, match="another text"):
        list(lives(range(17, 19), directory, monkeypatch))

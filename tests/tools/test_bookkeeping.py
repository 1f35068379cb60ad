"""The benchmark of the engine's bookkeeping, on a few steps."""

from __future__ import annotations

import gc
import json

import pytest

from tools.bench.bookkeeping import main, measure


def test_every_case_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    # The million objects of other tests are looked at no more.
    gc.freeze()
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    assert main(["--steps", "2"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["bookkeeping"]
    assert [(row["running"], row["queued"]) for row in told] == [
        (64, 0),
        (256, 0),
        (512, 0),
        (1024, 0),
        (256, 10_000),
    ]
    assert all(row["step_ms"] > 0 for row in told)


def test_the_parts_make_up_the_step():
    told = measure(3, 2, 5)
    assert 0 < told["inputs_ms"] < told["step_ms"]

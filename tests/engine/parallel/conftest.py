"""Runs ranks as threads in these tests."""

from __future__ import annotations

import pytest

from engine.parallel import ranks
from tests.engine.parallel.thread_ranks import ThreadRank


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch):
    monkeypatch.setattr(ranks, "Child", ThreadRank)

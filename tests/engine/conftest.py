"""Fixtures shared by the engine's tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def only_new_objects_collected() -> Iterator[None]:
    """Exempt all that is older than a file's tests from the garbage that sleeping engines collect.

    They look at every object of their process (``engine/gc_tuning.py``). A process of tests has
    imported all files, and each look at its million objects would take about a second.
    """
    from engine import core
    from engine.parallel import follower_worker

    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patched:
        for module in (core, follower_worker):
            patched.setattr(module, "collect_all", gc.collect)
        yield

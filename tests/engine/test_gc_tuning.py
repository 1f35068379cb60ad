"""Garbage collection in a serving process: no long pauses with many live objects."""

from __future__ import annotations

import subprocess
import sys

import pytest

# The number of objects that each collection visits while half a million long-lived ones are added,
# as those of waiting requests.
_SCRIPT = """
import gc
from engine.gc_tuning import tune_for_serving
tune_for_serving()
looked_at = []
def note(phase, info):
    if phase == "start":
        counts = (len(gc.get_objects(each)) for each in range(info["generation"] + 1))
        looked_at.append(sum(counts))
gc.callbacks.append(note)
alive = [[] for _ in range(500_000)]
gc.callbacks.remove(note)
print(len(looked_at), max(looked_at))
"""


@pytest.mark.slow
def test_no_collection_looks_at_all_that_waits() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, timeout=60
    )
    collections, most = map(int, told.stdout.split())
    assert collections > 10, "nothing was collected"
    assert most < 50_000

"""Python's cyclic garbage collector in a process that has loaded and serves from now on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# A step's tuples and lists die by their reference counts. The default of 700 new objects would
# have the collector look at them several times a step of a large batch, and find nothing. What a
# thousand waiting requests are made of is half a million objects, all of them alive, and everybody
# waits while they are looked at, a microsecond each: so the middle generation takes few, and all of
# them together are looked at as seldom as they were with more.
_THRESHOLDS = (10_000, 2, 700)


@contextmanager
def undisturbed() -> Iterator[None]:
    """While modules are imported: what they make is a million objects that stay. Looking for the
    few that do not, over and over, is a seventh of the time that the tensor library takes.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle() -> None:
    """Leave what is loaded alone: it stays, and no collection in mid-stream need look at it."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def reclaim() -> None:
    """Free what was loaded and is no longer referred to, although it was settled."""
    was_settled = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_settled:
        gc.freeze()

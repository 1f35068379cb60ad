"""Settings of Python's cyclic garbage collector for a serving process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# The objects of a step are freed by reference counting. At the default threshold of 700 new objects
# the collector would run several times in a step of a large batch, and find nothing. A thousand
# waiting requests consist of half a million objects, all alive, and scanning them blocks everybody
# for a microsecond per object. So the middle generation is kept small, and full collections are as
# rare as they were with a larger one.
_THRESHOLDS = (10_000, 2, 700)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Suspend collection during imports, and exempt what they create from later collections.

    Imports create a million objects that stay alive. Scanning them repeatedly for the few that do
    not takes a seventh of the time that importing the tensor library takes.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def tune_for_serving() -> None:
    """Exempt everything loaded so far from collection, and set thresholds suited to serving."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def collect_all() -> None:
    """Free loaded objects that are no longer referenced, even if ``tune_for_serving`` exempted
    them."""
    was_settled = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_settled:
        gc.freeze()

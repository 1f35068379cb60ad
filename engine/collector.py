"""Python's cyclic garbage collector in a process that has loaded and serves from now on."""

from __future__ import annotations

import gc

# A step's tuples and lists die by their reference counts. The default of 700 new objects would
# have the collector look at them several times a step of a large batch, and find nothing.
_THRESHOLDS = (20_000, 20, 50)


def settle() -> None:
    """Leave what is loaded alone: it stays, and no collection in mid-stream need look at it."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)

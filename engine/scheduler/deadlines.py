"""The deadlines of live sequences, earliest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine.scheduler.sequence import Sequence, Status

_MIN_STALE = 64  # fewer stale entries than this are not worth a rebuild


class Deadlines:
    """A heap with lazy deletion of the sequences that have a deadline.

    A check costs O(1) while no deadline has passed, and nothing if none is set. A sequence that
    ends in time stays in the heap until half of the heap is stale: O(log n) amortised, and memory
    in proportion to the live sequences.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []  # arrival order breaks ties
        self._num_stale = 0

    def add(self, seq: Sequence) -> None:
        """Track ``seq`` if its request has a deadline."""
        deadline_s = seq.request.deadline_s
        if deadline_s is not None:
            heapq.heappush(self._heap, (deadline_s, seq.order, seq))

    def discard(self, seq: Sequence) -> None:
        """Note that ``seq`` has ended."""
        if seq.request.deadline_s is None:
            return
        self._num_stale += 1
        if self._num_stale > max(_MIN_STALE, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if entry[2].status is not Status.FINISHED]
            heapq.heapify(self._heap)
            self._num_stale = 0

    def expired(self, now_s: float) -> Iterator[Sequence]:
        """The live sequences whose deadline is at or before ``now_s``; the caller ends each one."""
        while self._heap and self._heap[0][0] <= now_s:
            seq = self._heap[0][2]
            if seq.status is Status.FINISHED:
                heapq.heappop(self._heap)
                self._num_stale -= 1
            else:
                yield seq

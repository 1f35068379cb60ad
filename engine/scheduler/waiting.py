"""The sequences that wait for admission, in the policy's order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from engine.scheduler.sequence import Sequence, Status

SortKey = Callable[[Sequence], tuple[float, ...]]
_MIN_STALE = 64  # entries not worth a rebuild


class Waiting(Protocol):
    """A queue. Whoever is looked at is WAITING."""

    def push(self, seq: Sequence) -> None:
        """Queue ``seq``, which is WAITING and not queued."""
        ...

    def head(self) -> Sequence | None:
        """The sequence to be admitted next."""
        ...

    def pop(self, seq: Sequence) -> None:
        """Take the head off, which is ``seq``, once it has been admitted."""
        ...

    def discard(self, seq: Sequence) -> None:
        """Note that ``seq``, which is queued, is about to be no longer WAITING."""
        ...


class WaitingQueue:
    """A heap with lazy deletion: looking at the head costs O(1), however many wait.

    A sequence that stops waiting by another way than ``pop`` (aborted) stays in the heap until it
    comes up, or until half of the heap is such entries and it is rebuilt: O(log n) amortised.
    """

    def __init__(self, key: SortKey) -> None:
        self._key = key
        self._heap: list[tuple[tuple[float, ...], Sequence]] = []
        self._num_stale = 0

    def push(self, seq: Sequence) -> None:
        """Queue ``seq``."""
        heapq.heappush(self._heap, (self._key(seq), seq))  # keys are unique: no tie to break

    def head(self) -> Sequence | None:
        """The sequence with the smallest key."""
        while self._heap:
            seq = self._heap[0][1]
            if seq.status is Status.WAITING:
                return seq
            heapq.heappop(self._heap)
            self._num_stale -= 1
        return None

    def pop(self, seq: Sequence) -> None:
        """Take the head off."""
        heapq.heappop(self._heap)

    def discard(self, seq: Sequence) -> None:
        """Note that a queued sequence is no longer WAITING."""
        self._num_stale += 1
        if self._num_stale > max(_MIN_STALE, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapq.heapify(self._heap)
            self._num_stale = 0

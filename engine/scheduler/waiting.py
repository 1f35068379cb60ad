"""The queue of sequences that wait for admission."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from engine.scheduler.sequence import Sequence, Status

SortKey = Callable[[Sequence], tuple[float, ...]]
_MIN_STALE = 64  # fewer stale entries than this are not worth a rebuild


class SequenceQueue(Protocol):
    """A queue of sequences. All that it returns are WAITING."""

    def push(self, seq: Sequence) -> None:
        """Queue ``seq``, which is WAITING and not queued."""
        ...

    def head(self) -> Sequence | None:
        """The sequence to be admitted next."""
        ...

    def pop(self, seq: Sequence) -> None:
        """Remove ``seq``, the head, which has been admitted."""
        ...

    def discard(self, seq: Sequence) -> None:
        """Note that ``seq``, which is queued, is about to leave the WAITING status."""
        ...


class WaitingQueue:
    """A heap with lazy deletion: reading the head costs O(1), however many sequences wait.

    A sequence that leaves other than by ``pop`` (because it was aborted) stays in the heap until it
    reaches the top. When half of the heap is stale it is rebuilt: O(log n) amortised.
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
        """Remove the head."""
        heapq.heappop(self._heap)

    def discard(self, seq: Sequence) -> None:
        """Note that a queued sequence is about to leave the WAITING status."""
        self._num_stale += 1
        if self._num_stale > max(_MIN_STALE, len(self._heap) // 2):
            live = (entry for entry in self._heap if entry[1].status is Status.WAITING)
            self._heap = [entry for entry in live if entry[1] is not seq]
            heapq.heapify(self._heap)
            self._num_stale = 0

"""Longest cached prefix first: admit the sequence that reuses most of the KV cache.

    Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024:
    this order walks the tree of prompts depth first, so that every request with a given prefix is
    served before the prefix is evicted.

The ``_WINDOW`` longest-waiting sequences are looked up in the prefix cache. The one with the most
cached tokens becomes the head of the queue, the earliest arrival among equals. It stays the head
until a sequence starts or stops running, or has its first token, so that others can share its
prompt. Until then there is no room for another anyway, and a step makes no lookups, however many
sequences wait.

In the paper, a request without a cached prefix may wait forever while others with one keep
arriving. Here the first in line is passed over at most ``_MAX_SKIPS`` times in a row.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from engine.scheduler.policy import KeyPolicy, first_come_first_served
from engine.scheduler.sequence import Sequence
from engine.scheduler.waiting import SequenceQueue, SortKey, WaitingQueue

_WINDOW = 64  # a lookup costs a few microseconds
_MAX_SKIPS = 64


class LongestPrefixPolicy(KeyPolicy):
    """Admits by cached prefix; running sequences are ranked first come, first served.

    Args:
        num_cached: the number of a waiting sequence's tokens in the prefix cache now.
        num_changes: how often room or prefixes may have come (``SchedulerState.num_changes``).
    """

    is_rank_ordered = False

    def __init__(
        self, num_cached: Callable[[Sequence], int], num_changes: Callable[[], int]
    ) -> None:
        super().__init__(first_come_first_served)
        self._num_cached = num_cached
        self._num_changes = num_changes

    def new_queue(self) -> SequenceQueue:
        """A queue ordered by cached prefix."""
        return _PrefixQueue(self.rank, self._num_cached, self._num_changes)


class _PrefixQueue:
    """A window with the earliest arrivals, which is searched, and a heap with all others."""

    def __init__(
        self,
        key: SortKey,
        num_cached: Callable[[Sequence], int],
        num_changes: Callable[[], int],
    ) -> None:
        self._key = key
        self._num_cached = num_cached
        self._num_changes = num_changes
        self._window: list[Sequence] = []  # sorted by key; none greater than any in the heap
        self._overflow = WaitingQueue(key)
        self._head: Sequence | None = None
        self._num_changes_at_choice = -1  # when the head was chosen
        self._num_skipped = 0  # consecutive times that the first in the window was not chosen

    def push(self, seq: Sequence) -> None:
        """Queue ``seq``."""
        first_behind = self._overflow.head()
        if first_behind is not None and self._key(first_behind) < self._key(seq):
            self._overflow.push(seq)
            return
        insort(self._window, seq, key=self._key)
        last = self._window.pop() if len(self._window) > _WINDOW else None
        if last is not None:
            self._overflow.push(last)
        if self._head is not None and (self._head is last or _is_less_urgent(self._head, seq)):
            self._head = None

    def head(self) -> Sequence | None:
        """The sequence in the window with the longest cached prefix."""
        num_changes = self._num_changes()
        if self._head is None or num_changes != self._num_changes_at_choice:
            self._fill()
            self._head, self._num_changes_at_choice = self._choose(), num_changes
        return self._head

    def pop(self, seq: Sequence) -> None:
        """Remove the head."""
        self._num_skipped = 0 if seq is self._window[0] else self._num_skipped + 1
        self._window.remove(seq)
        self._head = None

    def discard(self, seq: Sequence) -> None:
        """Note that a queued sequence is about to leave the WAITING status."""
        if seq not in self._window:
            self._overflow.discard(seq)
            return
        if seq is self._window[0]:
            self._num_skipped = 0
        self._window.remove(seq)
        if seq is self._head:
            self._head = None

    def _fill(self) -> None:
        while len(self._window) < _WINDOW and (seq := self._overflow.head()) is not None:
            self._overflow.pop(seq)
            self._window.append(seq)

    def _choose(self) -> Sequence | None:
        """The longest cached prefix among those as urgent as the first; the earliest on ties."""
        if not self._window:
            return None
        first = self._window[0]
        if self._num_skipped >= _MAX_SKIPS:
            return first
        equals = (seq for seq in self._window if not _is_less_urgent(seq, first))
        return max(equals, key=self._num_cached)


def _is_less_urgent(seq: Sequence, other: Sequence) -> bool:
    """Whether ``seq`` is background work and ``other`` is not."""
    return seq.request.background and not other.request.background

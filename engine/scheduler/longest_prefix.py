"""Longest cached prefix first: whoever reuses most of the KV cache is admitted next.

    Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024:
    requests served in this order walk the tree of their prompts depth first, so that a prefix is
    used by all who have it before it is evicted.

The longest-waiting sequences (``_WINDOW`` of them) are looked up in the prefix cache, and the one
of which most tokens are found becomes the head; among equals the first to arrive does. It stays
the head until one has begun or ended to run: before that there is no room for another, and a step
looks nothing up, however many wait.

In the paper a request without a cached prefix may wait for ever while others with one keep coming.
Here the first in line is passed over ``_MAX_PASSED_OVER`` times in a row at most.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from engine.scheduler.policy import KeyPolicy, first_come_first_served
from engine.scheduler.sequence import Sequence
from engine.scheduler.waiting import SortKey, Waiting, WaitingQueue

_WINDOW = 64  # a look at each costs a few microseconds
_MAX_PASSED_OVER = 64


class LongestPrefixPolicy(KeyPolicy):
    """Among those who run, first come first served.

    Args:
        num_cached: tokens of a waiting sequence that the prefix cache holds now.
        num_running: sequences that run now.
    """

    orders_by_rank = False

    def __init__(
        self, num_cached: Callable[[Sequence], int], num_running: Callable[[], int]
    ) -> None:
        super().__init__(first_come_first_served)
        self._num_cached = num_cached
        self._num_running = num_running

    def new_queue(self) -> Waiting:
        """By cached prefix."""
        return _PrefixQueue(self.rank, self._num_cached, self._num_running)


class _PrefixQueue:
    """The first to arrive in a window that is looked through, all others in a heap behind it."""

    def __init__(
        self,
        key: SortKey,
        num_cached: Callable[[Sequence], int],
        num_running: Callable[[], int],
    ) -> None:
        self._key = key
        self._num_cached = num_cached
        self._num_running = num_running
        self._window: list[Sequence] = []  # by key; none of a greater key than any in the heap
        self._behind = WaitingQueue(key)
        self._head: Sequence | None = None
        self._num_ran = -1  # when the head was chosen
        self._num_passed_over = 0  # times in a row that the first of the window was

    def push(self, seq: Sequence) -> None:
        """Queue ``seq``."""
        first_behind = self._behind.head()
        if first_behind is not None and self._key(first_behind) < self._key(seq):
            self._behind.push(seq)
            return
        insort(self._window, seq, key=self._key)
        last = self._window.pop() if len(self._window) > _WINDOW else None
        if last is not None:
            self._behind.push(last)
        if self._head is not None and (self._head is last or _is_behind(self._head, seq)):
            self._head = None

    def head(self) -> Sequence | None:
        """The longest cached prefix of the window."""
        num_running = self._num_running()
        if self._head is None or num_running != self._num_ran:
            self._fill()
            self._head, self._num_ran = self._choose(), num_running
        return self._head

    def pop(self, seq: Sequence) -> None:
        """Take the head off."""
        self._num_passed_over = 0 if seq is self._window[0] else self._num_passed_over + 1
        self._window.remove(seq)
        self._head = None

    def discard(self, seq: Sequence) -> None:
        """Note that a queued sequence is about to be no longer WAITING."""
        if seq not in self._window:
            self._behind.discard(seq)
            return
        if seq is self._window[0]:
            self._num_passed_over = 0
        self._window.remove(seq)
        if seq is self._head:
            self._head = None

    def _fill(self) -> None:
        while len(self._window) < _WINDOW and (seq := self._behind.head()) is not None:
            self._behind.pop(seq)
            self._window.append(seq)

    def _choose(self) -> Sequence | None:
        """The longest cached prefix of those as urgent as the first; ``max`` keeps the earliest."""
        if not self._window:
            return None
        first = self._window[0]
        if self._num_passed_over >= _MAX_PASSED_OVER:
            return first
        equals = (seq for seq in self._window if not _is_behind(seq, first))
        return max(equals, key=self._num_cached)


def _is_behind(seq: Sequence, other: Sequence) -> bool:
    """Whether ``seq`` is work in the background and ``other`` is not."""
    return seq.request.background and not other.request.background

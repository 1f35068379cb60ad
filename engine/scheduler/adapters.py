"""Which adapters the sequences of an engine have, running and waiting."""

from __future__ import annotations

from collections import Counter

from engine.scheduler.sequence import Sequence, Status


class AdapterCounts:
    """Sequences by the name of their adapter; those without one cost a look. Written by the
    SchedulerState alone."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[Status, Counter[str]] = {
            Status.WAITING: Counter(),
            Status.RUNNING: Counter(),
        }

    def move(self, seq: Sequence, before: Status | None, after: Status | None) -> None:
        """``seq`` is no longer ``before`` but ``after``; None: it was not, or will not be, here."""
        adapter = seq.request.adapter
        if adapter is None:
            return
        if after is not None:
            self._counts[after][adapter.name] += 1
        if before is not None:
            counts = self._counts[before]
            counts[adapter.name] -= 1
            if not counts[adapter.name]:
                del counts[adapter.name]

    def names(self, status: Status) -> tuple[str, ...]:
        """The adapters of those that are RUNNING or WAITING, in O(adapters)."""
        return tuple(self._counts[status])

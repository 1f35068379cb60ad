"""Counts the adapters used by running and waiting sequences."""

from __future__ import annotations

from collections import Counter

from engine.scheduler.sequence import Sequence, Status


class AdapterCounts:
    """Sequences per adapter name and status. Written only by SchedulerState."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[Status, Counter[str]] = {
            Status.WAITING: Counter(),
            Status.RUNNING: Counter(),
        }

    def move(self, seq: Sequence, before: Status | None, after: Status | None) -> None:
        """Count ``seq`` as ``after`` instead of ``before``; None stands for not being live."""
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
        """The adapters of RUNNING or WAITING sequences, in O(adapters)."""
        return tuple(self._counts[status])

"""One process's numbers, which can be counted, sent and summed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from engine.stats import EngineStats
from server.metrics.names import COUNTERS, HISTOGRAMS, KNOWN_LABELS, LABELLED_COUNTERS

_KeyT = TypeVar("_KeyT")


class Histogram(msgspec.Struct, array_like=True):
    """Counts by bucket, one more than there are upper bounds, and a sum."""

    counts: list[int]
    total: float = 0.0


class EngineMetricValues(msgspec.Struct):
    """One API process's view of one engine."""

    stats: EngineStats = EngineStats()
    stats_s: float = 0.0  # time.monotonic() of the engine's last report
    up: bool = False  # whether it can take requests
    num_restarts: int = 0
    num_resumed: int = 0  # requests that were resumed in it


class MetricValues(msgspec.Struct):
    """All counts of one API process, and its last reports from the engines."""

    counts: dict[str, int]
    labelled: dict[str, dict[str, int]]  # by name, then by label
    http: dict[tuple[str, str, str], int]  # by method, route and status
    histograms: dict[str, Histogram]
    engines: list[EngineMetricValues]  # by number

    @classmethod
    def zero(cls, num_engines: int = 1) -> MetricValues:
        """All names, with zero counts."""
        return cls(
            counts=dict.fromkeys(COUNTERS, 0),
            labelled={
                name: dict.fromkeys(KNOWN_LABELS.get(name, ()), 0) for name in LABELLED_COUNTERS
            },
            http={},
            histograms={
                name: Histogram([0] * (len(bounds) + 1)) for name, (_, bounds) in HISTOGRAMS.items()
            },
            engines=[EngineMetricValues() for _ in range(num_engines)],
        )

    def count(self, name: str, label: str, times: int = 1) -> None:
        """Increment a labelled counter."""
        counts = self.labelled[name]
        counts[label] = counts.get(label, 0) + times

    def fail_live(self, reason: str) -> None:
        """Count the sequences that were submitted and have not ended as failed."""
        ends = ("request_success", "request_failed", "request_aborted")
        ended = sum(sum(self.labelled[name].values()) for name in ends)
        live = sum(self.histograms["request_prompt_tokens"].counts) - ended
        if live > 0:
            self.count("request_failed", reason, live)

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Add ``value`` to a histogram, ``times`` times."""
        histogram = self.histograms[name]
        histogram.counts[bisect_left(HISTOGRAMS[name][1], value)] += times
        histogram.total += value * times


def merge(parts: Iterable[MetricValues]) -> MetricValues:
    """The sum of several processes' numbers, with the newest report of each engine."""
    parts = list(parts)
    total = MetricValues.zero(max((len(part.engines) for part in parts), default=1))
    for part in parts:
        _add(total.counts, part.counts)
        for name, counts in part.labelled.items():
            _add(total.labelled[name], counts)
        _add(total.http, part.http)
        for name, histogram in part.histograms.items():
            into = total.histograms[name]
            into.counts = [a + b for a, b in zip(into.counts, histogram.counts, strict=True)]
            into.total += histogram.total
        for engine, heard in zip(total.engines, part.engines, strict=False):
            _merge_engine(engine, heard)
    return total


def _merge_engine(total: EngineMetricValues, part: EngineMetricValues) -> None:
    if part.stats_s >= total.stats_s:
        total.stats, total.stats_s = part.stats, part.stats_s
    total.up = total.up or part.up
    total.num_restarts += part.num_restarts
    total.num_resumed += part.num_resumed


def _add(into: dict[_KeyT, int], part: Mapping[_KeyT, int]) -> None:
    for key, count in part.items():
        into[key] = into.get(key, 0) + count

"""Conversion of the numbers to Prometheus families."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.types import EngineInfo
from server.metrics.engine_families import EngineFamilies
from server.metrics.families import Families
from server.metrics.names import COUNTERS, HISTOGRAMS, LABELLED_COUNTERS
from server.metrics.values import Histogram, MetricValues

_ALL_ENGINES = "all"  # label of what is counted for several engines together


class Exposition(Collector):
    """One scrape's families, for ``prometheus_client.generate_latest``.

    Samples of an engine's statistics carry the engine's number as a label; if there is only one
    engine, all samples do.

    Args:
        values: of this process, or summed over all workers.
        infos: what each engine has loaded, by number; None before it has.
        prefix: first part of every name.
        model_name: a label of every sample.
        max_loras: adapters that fit on the device; 0 omits the metrics of adapters.
    """

    def __init__(
        self,
        values: MetricValues,
        infos: Sequence[EngineInfo | None],
        *,
        prefix: str,
        model_name: str,
        max_loras: int = 0,
    ) -> None:
        self._values = values
        self._infos = infos
        self._prefix = prefix
        self._model_name = model_name
        self._max_loras = max_loras

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        yield from self._collect_engines()
        engines = len(self._values.engines)
        families = self._families("0" if engines == 1 else _ALL_ENGINES)
        labels = families.labels
        for name, help in COUNTERS.items():
            yield families.counter(name, help, self._values.counts[name])
        for name, (label, help) in LABELLED_COUNTERS.items():
            yield families.labelled_counter(name, help, label, self._values.labelled[name])
        for name, (help, bounds) in HISTOGRAMS.items():
            family = HistogramMetricFamily(families.name(name), help, labels=list(labels))
            histogram = self._values.histograms[name]
            family.add_metric(
                list(labels.values()), _buckets(bounds, histogram), sum_value=histogram.total
            )
            yield family
        http = CounterMetricFamily(
            families.name("http_requests"),
            "HTTP requests answered.",
            labels=["method", "route", "status"],
        )
        for http_labels, count in self._values.http.items():
            http.add_metric(http_labels, count)
        yield http

    def _collect_engines(self) -> Iterator[Metric]:
        """The engines' families, each with the samples of all engines."""
        joined: dict[str, Metric] = {}
        engines = self._values.engines
        for number, numbers in enumerate(engines):
            families = self._families(str(number))
            of_engine = EngineFamilies(
                numbers, self._infos[number], families, max_loras=self._max_loras
            )
            found = list(of_engine.collect())
            if len(engines) > 1:
                help = "Whether the engine accepts requests."
                found.append(families.gauge("engine_up", help, numbers.up))
            for family in found:
                known = joined.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from joined.values()

    def _families(self, engine: str) -> Families:
        return Families(self._prefix, {"model_name": self._model_name, "engine": engine})


def _buckets(bounds: Sequence[float], histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus expects."""
    limits = [*map(str, bounds), "+Inf"]
    return list(zip(limits, map(float, accumulate(histogram.counts)), strict=True))

"""Construction of Prometheus families, with the labels common to all."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


class Families:
    """Makes families whose samples share labels.

    Args:
        prefix: first part of every name.
        labels: of every sample, before its own.
    """

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self.labels = dict(labels)
        self._prefix = prefix

    def name(self, name: str) -> str:
        """The full metric name."""
        return f"{self._prefix}:{name}"

    def gauge(self, name: str, help: str, value: float) -> GaugeMetricFamily:
        """A gauge with one sample."""
        family = GaugeMetricFamily(self.name(name), help, labels=list(self.labels))
        family.add_metric(list(self.labels.values()), value)
        return family

    def counter(self, name: str, help: str, value: float) -> CounterMetricFamily:
        """A counter with one sample."""
        family = CounterMetricFamily(self.name(name), help, labels=list(self.labels))
        family.add_metric(list(self.labels.values()), value)
        return family

    def labelled_counter(
        self, name: str, help: str, label: str, counts: Mapping[str, int]
    ) -> CounterMetricFamily:
        """A counter with one sample per value of ``label``."""
        family = CounterMetricFamily(self.name(name), help, labels=[*self.labels, label])
        for value, count in counts.items():
            family.add_metric([*self.labels.values(), value], count)
        return family

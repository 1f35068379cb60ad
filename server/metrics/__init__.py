"""The server's metrics, and their exposition for Prometheus.

    event loop ── adds to ──► MetricValues ◄── merged over API workers ──► families ──► /metrics
                 recorder.py   values.py                                  exposition.py

Values are plain numbers that the event loop adds to. They become Prometheus families only on a
scrape, so that a token costs a few additions and no lock, and the numbers of several processes can
be summed. Gauges are read from the engine's newest statistics.

A *sequence* is one choice of one prompt: a request with ``n = 2`` counts two. Prompt tokens are
counted once per prompt, as in ``usage``. Every submitted sequence ends in exactly one of
``request_success``, ``request_failed`` and ``request_aborted``.
"""

from server.metrics.recorder import Metrics
from server.metrics.values import MetricValues, merge

__all__ = ["MetricValues", "Metrics", "merge"]

"""What the server counts, and how Prometheus is told.

    event loop ── adds to ──► Numbers ◄── merged over API workers ──► families ──► /metrics
                 recorder.py   numbers.py                            exposition.py

Values are plain numbers that the event loop adds to; they become Prometheus families only when
somebody asks, so that a token costs a few additions and no lock, and so that several processes'
numbers can be added up. Gauges are read from the engine's newest snapshot.

A *sequence* is one choice of one prompt: a request with ``n = 2`` counts two. Prompt tokens are
counted once a prompt, as in ``usage``. Every sequence that was submitted ends in exactly one of
``request_success``, ``request_failed`` and ``request_aborted``.
"""

from server.metrics.numbers import Numbers, merge
from server.metrics.recorder import Metrics

__all__ = ["Metrics", "Numbers", "merge"]

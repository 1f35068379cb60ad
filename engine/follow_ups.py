"""Requests that come one after the other to answer one question, such as those of a beam search.

To the engine each is a request of its own. Before it sleeps it lets what runs end, so between two
of them it waits a moment for the next one, which is not new.
"""

from __future__ import annotations

import time

from engine.types import EngineOutput, Request

_PATIENCE_S = 0.5  # many times what a client takes between two requests


class FollowUps:
    """Which requests are on their way, as far as the engine can tell. Used by its thread alone."""

    def __init__(self) -> None:
        self._live: set[str] = set()  # requests that will be followed
        self._expected_until_s = 0.0  # time.monotonic()

    def begin(self, request: Request) -> None:
        """Note a request that was accepted, whose end will be in an output."""
        if request.is_followed:
            self._live.add(request.id)

    def end(self, output: EngineOutput) -> None:
        """Note the requests that end in ``output``."""
        if not self._live:
            return
        reasons = zip(output.ids, output.finish_reasons, strict=True)
        ended = self._live.intersection(id for id, reason in reasons if reason is not None)
        if ended:
            self._live -= ended
            self._expected_until_s = time.monotonic() + _PATIENCE_S

    @property
    def remaining_s(self) -> float:
        """How much longer the next request may take to arrive; 0: none is expected."""
        return max(0.0, self._expected_until_s - time.monotonic())

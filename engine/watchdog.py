"""Ends an engine process whose step hangs, so that its supervisor starts another.

A step that hangs in a driver or a kernel cannot be interrupted and may hold the GIL, so the
watchdog must need neither. ``faulthandler`` provides such a thread, written in C. It dumps the
traceback of every thread to standard error and exits the process.
"""

from __future__ import annotations

import faulthandler
import time

_REARM_FRACTION = 0.1  # of the limit: re-arming in every step would cost a thread each time


class StepWatchdog:
    """Call ``arm`` before each step, and ``disarm`` before waiting for anything else.

    Only one may exist per process, since the alarm belongs to the process.

    Args:
        limit_s: seconds that a step may take; the alarm goes off after at least 0.9 of this. None:
            no limit.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._rearm_at_s = 0.0
        self._is_armed = False

    def arm(self) -> None:
        """Note that a step begins."""
        if self._limit_s is None:
            return
        now_s = time.monotonic()
        if not self._is_armed or now_s >= self._rearm_at_s:
            faulthandler.dump_traceback_later(self._limit_s, exit=True)
            self._is_armed = True
            self._rearm_at_s = now_s + self._limit_s * _REARM_FRACTION

    def disarm(self) -> None:
        """Note that no step is running."""
        if self._is_armed:
            faulthandler.cancel_dump_traceback_later()
            self._is_armed = False

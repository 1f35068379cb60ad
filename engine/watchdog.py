"""Ends an engine whose step does not end: its supervisor starts another, where requests go on.

A step that hangs in a driver or a kernel cannot be interrupted, and may hold Python's lock: what
watches it must need neither. ``faulthandler`` has such a thread, in C: it writes where every thread
stands to standard error and ends the process.
"""

from __future__ import annotations

import faulthandler
import time

_REARM_SHARE = 0.1  # of the limit: setting the alarm for each step would cost a thread each


class StepWatchdog:
    """Call ``watch`` before each step and ``rest`` before waiting for anything else.

    Only one in a process: the alarm is the process's.

    Args:
        limit_s: seconds that a step may take; an alarm goes off after 0.9 of them at the earliest.
            None: any number.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._rearm_at_s = 0.0
        self._is_armed = False

    def watch(self) -> None:
        """A step begins."""
        if self._limit_s is None:
            return
        now_s = time.monotonic()
        if not self._is_armed or now_s >= self._rearm_at_s:
            faulthandler.dump_traceback_later(self._limit_s, exit=True)
            self._is_armed = True
            self._rearm_at_s = now_s + self._limit_s * _REARM_SHARE

    def rest(self) -> None:
        """No step is under way."""
        if self._is_armed:
            faulthandler.cancel_dump_traceback_later()
            self._is_armed = False

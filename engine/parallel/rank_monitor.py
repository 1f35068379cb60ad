"""Notices a lost rank by the end of its socket."""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable, Sequence

from engine.parallel.ranks import HANG_UP, Rank

logger = logging.getLogger(__name__)

_END_GRACE_S = 2.0
_LOST_NAME_TIMEOUT_S = 2.0


class RankMonitor:
    """Watches the ranks, and acts when one is lost. It does not reference the team, so that a
    team can be garbage-collected while it is watched."""

    def __init__(self) -> None:
        self.callback: Callable[[str], None] | None = None
        self._is_ending = False
        self._lost = "another"
        self._has_lost = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, ranks: Sequence[Rank]) -> None:
        """Start watching for the other end of a socket being closed."""
        self._thread = threading.Thread(target=self._run, args=(ranks,), name="ranks", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Expect the sockets to be shut down, which is no loss from now on."""
        self._is_ending = True

    def name_lost(self) -> str:
        """Return the name of the lost rank. A collective can fail before that rank's socket
        shows it, so this waits for a moment; "another" if all sockets are still open after it."""
        self._has_lost.wait(_LOST_NAME_TIMEOUT_S)
        return self._lost

    def join(self) -> None:
        """Wait until the watching thread has ended."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_GRACE_S)

    def _run(self, ranks: Sequence[Rank]) -> None:
        poll = select.poll()
        names = {rank.socket.fileno(): rank.name for rank in ranks}
        for descriptor in names:
            poll.register(descriptor, HANG_UP)
        gone = poll.poll()
        if self._is_ending:
            return
        self._lost = ", ".join(names[descriptor] for descriptor, _ in gone)
        self._has_lost.set()
        logger.critical("%s ended: the model is no longer whole", self._lost)
        if self.callback is not None:
            self.callback(f"{self._lost} ended")

"""Ranks as threads of the test's process: real leader, follower, frames and collectives.

This avoids the seconds that a process takes to import torch.
"""

from __future__ import annotations

import itertools
import socket
import threading

from engine.errors import EngineDead
from engine.parallel.follower import read_messages, run_follower
from engine.parallel.frames import Join


class ThreadRank:
    """A rank in place of ``engine.child.Child``."""

    _pids = itertools.count(1)

    def __init__(self, module: str) -> None:
        assert module == "engine.parallel.follower"
        self.socket, theirs = socket.socketpair()
        self.pid = next(self._pids)
        self.failure: BaseException | None = None
        self._theirs = theirs
        self._thread = threading.Thread(target=self._run, args=(theirs,), daemon=True)
        self._thread.start()

    def hang_up(self) -> None:
        """End like a killed process, once the current work is done."""
        self._theirs.shutdown(socket.SHUT_RDWR)

    def end(self, grace_s: float) -> int:
        self._thread.join(60)
        assert not self._thread.is_alive(), "a rank goes on without its team"
        if self.failure is not None and not isinstance(self.failure, EngineDead):
            raise self.failure
        return 0

    def _run(self, connection: socket.socket) -> None:
        with connection:
            try:
                messages = read_messages(connection)
                join = next(messages, None)
                assert isinstance(join, Join)
                run_follower(connection, join, messages)
            except (BrokenPipeError, ConnectionResetError):
                pass
            except BaseException as error:  # raised by ``end`` in the test's thread
                self.failure = error

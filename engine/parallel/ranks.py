"""A follower rank as rank 0 sees it: a process at the other end of a socket."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from typing import Protocol

from engine.child import Child
from engine.framing import receive
from engine.parallel.frames import FromRank, FromRankReader

# The poll event of a closed peer; over TCP it is only reported on request.
HANG_UP = getattr(select, "POLLRDHUP", 0)


class Rank(Protocol):
    """Rank 0's interface to another rank, wherever that runs."""

    @property
    def socket(self) -> socket.socket:
        """A blocking stream; the rank ends when it is closed."""
        ...

    @property
    def name(self) -> str:
        """A readable name, such as ``rank 1 (process 123)``."""
        ...

    def end(self, grace_s: float) -> None:
        """Wait for the rank's end, after its socket was shut down; kill it after a grace period
        if possible."""
        ...


class LocalRank:
    """A :class:`Rank` on this machine. The constructor starts it.

    Args:
        number: its number.
    """

    def __init__(self, number: int) -> None:
        self._child = Child("engine.parallel.follower")
        self.socket = self._child.socket
        self.name = f"rank {number} (process {self._child.pid})"

    def end(self, grace_s: float) -> None:
        """See ``Rank``."""
        self.socket.close()
        self._child.end(grace_s)


def read_rank_messages(rank: Rank) -> Iterator[FromRank]:
    """Yield all messages of a rank until it is gone. Raises OSError or FrameError."""
    frames = FromRankReader()
    while messages := receive(rank.socket, frames):
        yield from messages

"""A rank behind the first, as rank 0 has it: a process of its own at the other end of a socket."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from typing import Protocol

from engine.child import Child
from engine.framing import receive
from engine.parallel.frames import FromRank, LeaderFrames

# What to poll for to be told of the other end's: over TCP only those are told who ask.
HANG_UP = getattr(select, "POLLRDHUP", 0)


class Rank(Protocol):
    """What rank 0 asks of another one, wherever that is."""

    @property
    def socket(self) -> socket.socket:
        """A blocking stream; its end is the end of the rank."""
        ...

    @property
    def name(self) -> str:
        """For people, such as ``rank 1 (process 123)``."""
        ...

    def end(self, grace_s: float) -> None:
        """See it out, once its socket is shut down; where it can be, by force after a grace."""
        ...


class LocalRank:
    """A :class:`Rank` on this machine. Starts it.

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


def all_said(rank: Rank) -> Iterator[FromRank]:
    """All that a rank says, until it has gone. Raises OSError or FrameError."""
    frames = LeaderFrames()
    while messages := receive(rank.socket, frames):
        yield from messages

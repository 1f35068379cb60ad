"""Rank 0's connections to the others: what it tells them, and the answers it waits for.

Each rank's frames arrive in the order in which it sent them, so the next message of a rank is the
answer to the oldest question that it has not answered yet. A rank that is gone is an EngineDead
for whoever sends to it or waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from engine.errors import EngineDead, ModelLoadError
from engine.framing import encode
from engine.parallel.frames import (
    Done,
    Failed,
    FromRank,
    Loaded,
    Prepared,
    RendezvousDone,
    ToRank,
)
from engine.parallel.ranks import Rank, read_rank_messages

_Expected = TypeVar("_Expected", Loaded, Prepared, RendezvousDone, Done)


class RankLinks:
    """The other ranks, in the order of their numbers, which begin at 1.

    Attributes:
        ranks: those that are connected.
        messages: what each of them sends; ``expect`` reads it.
    """

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.messages: list[Iterator[FromRank]] = []

    def add(self, ranks: Sequence[Rank]) -> None:
        """Take the ranks with the next numbers."""
        self.ranks += ranks
        self.messages += map(read_rank_messages, ranks)

    def broadcast(self, message: ToRank, end: int | None = None) -> None:
        """Send a message to all ranks, or to those before number ``end``. Raises EngineDead."""
        frame = encode(message)
        for rank in self.ranks[: None if end is None else end - 1]:
            _send(rank, frame)

    def send(self, number: int, message: ToRank) -> None:
        """Send a message to one rank. Raises EngineDead."""
        _send(self.ranks[number - 1], encode(message))

    def expect_all(
        self, kind: type[_Expected], numbers: Iterable[int] | None = None
    ) -> list[_Expected]:
        """Return the next message of all ranks, or of those with ``numbers``.

        Raises:
            ModelLoadError: a rank reports a failure instead.
            EngineDead: a rank is gone.
        """
        asked = range(1, len(self.ranks) + 1) if numbers is None else numbers
        return [self._expect(number, kind) for number in asked]

    def expect_all_done(self) -> None:
        """Wait until all ranks have finished their task; then raise the first failure, if any.

        Raises as ``expect_all`` does.
        """
        problems: list[ModelLoadError] = []
        for number in range(1, len(self.ranks) + 1):
            try:
                self._expect(number, Done)
            except ModelLoadError as error:
                problems.append(error)
        if problems:
            raise problems[0]

    def _expect(self, number: int, kind: type[_Expected]) -> _Expected:
        try:
            message = next(self.messages[number - 1], None)
        except OSError:
            message = None
        if message is None:
            raise EngineDead(f"{self.ranks[number - 1].name} ended while others waited for it")
        if isinstance(message, Failed):
            raise ModelLoadError(message.message)
        assert isinstance(message, kind)
        return message


def _send(rank: Rank, frame: bytes) -> None:
    try:
        rank.socket.sendall(frame)
    except OSError as error:
        raise EngineDead(f"{rank.name} is gone: {error.strerror}") from None

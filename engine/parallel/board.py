"""How ranks of several machines find each other: what each has to tell, its address and port above
all, goes through rank 0 over the connections that are there already, and nothing else listens.

    rank 2 ── Posted ──► rank 0 ── Posted ──► rank 1, 3        until everybody has met
    all    ── Met ─────► rank 0 ── Met ─────► all              then passes follow

A process group of torch takes this for one of its stores, in which it writes what it has to tell
under a key and waits for what others write.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch import distributed

from engine.errors import EngineDead
from engine.framing import FrameError, encode
from engine.parallel.frames import FromRank, Met, Posted, ToRank
from engine.parallel.ranks import Rank

_distributed: Any = distributed  # its stubs hide the class
_Store: Any = _distributed.Store
_TIMEOUT_S = 60.0  # all have loaded by then


class Board(_Store):
    """A ``torch.distributed.Store`` of which every rank has a copy.

    Args:
        tell: tells the others of a new value.
    """

    def __init__(self, tell: Callable[[Posted], None]) -> None:
        super().__init__()
        self._tell = tell
        self._values: dict[str, bytes] = {}
        self._news = threading.Condition()
        self._problem: str | None = None

    def put(self, posted: Posted) -> None:
        """Another rank has something to tell."""
        with self._news:
            self._values[posted.key] = posted.value
            self._news.notify_all()

    def fail(self, problem: str) -> None:
        """Nothing more will come: who waits is told so."""
        with self._news:
            self._problem = problem
            self._news.notify_all()

    def set(self, key: str, value: bytes) -> None:
        """See ``Store``."""
        posted = Posted(key, bytes(value))
        self.put(posted)
        self._tell(posted)

    def get(self, key: str) -> bytes:
        """See ``Store``; waits for it."""
        self.wait([key])
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        """See ``Store``."""
        with self._news:
            return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See ``Store``. Raises RuntimeError, as torch does, where a value does not come."""
        limit_s = _TIMEOUT_S if timeout is None else min(timeout.total_seconds(), _TIMEOUT_S)

        def is_decided() -> bool:
            return self._problem is not None or all(key in self._values for key in keys)

        with self._news:
            if not self._news.wait_for(is_decided, limit_s):
                raise RuntimeError(f"the others did not come to meet within {limit_s:g} s")
            if self._problem is not None and any(key not in self._values for key in keys):
                raise RuntimeError(self._problem)


class Relay:
    """Rank 0's board, and what hands everybody's values on until all have met.

    Args:
        ranks: the others.
        said: what each of them says; nobody else reads it meanwhile.
    """

    def __init__(self, ranks: Sequence[Rank], said: Sequence[Iterator[FromRank]]) -> None:
        self.board = Board(self._hand_on)
        self._ranks = ranks
        self._sending = threading.Lock()
        self._problem: str | None = None
        self._threads = [
            threading.Thread(target=self._hear, args=pair, name="meeting", daemon=True)
            for pair in zip(ranks, said, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """All have met, or are about to. Raises EngineDead where one is gone."""
        for thread in self._threads:
            thread.join()
        if self._problem is not None:
            raise EngineDead(self._problem)
        self._send(Met(), None)

    def _hear(self, rank: Rank, said: Iterator[FromRank]) -> None:
        problem = f"{rank.name} ended before it had met the others"
        try:
            for message in said:
                if isinstance(message, Met):
                    return
                self._heard(message, rank)
        except FrameError as error:
            problem = f"{rank.name}: {error}"
        except OSError:
            pass  # it was cut off, and has ended as well
        self._problem = self._problem or problem
        self.board.fail(problem)

    def _heard(self, message: FromRank, rank: Rank) -> None:
        if not isinstance(message, Posted):
            raise FrameError(f"{type(message).__name__} is none of a meeting")
        self.board.put(message)
        self._send(message, rank)

    def _hand_on(self, posted: Posted) -> None:
        self._send(posted, None)

    def _send(self, message: Posted | Met, source: Rank | None) -> None:
        frame = encode(message)
        with self._sending:
            for rank in self._ranks:
                if rank is not source:
                    with contextlib.suppress(OSError):  # who reads from it tells that it is gone
                        rank.socket.sendall(frame)


class Attendance:
    """Another rank's board, which is kept up to date until rank 0 says that all have met.

    Args:
        messages: what rank 0 says; nobody else reads them meanwhile.
        send: tells rank 0.
    """

    def __init__(self, messages: Iterator[ToRank], send: Callable[[FromRank], None]) -> None:
        self.board = Board(send)
        self._messages = messages
        self._send = send
        self._thread = threading.Thread(target=self._hear, name="meeting", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """This rank has met the others; returns when all have, or rank 0 has gone."""
        self._send(Met())
        self._thread.join()

    def _hear(self) -> None:
        for message in self._messages:
            if isinstance(message, Met):
                return
            if isinstance(message, Posted):
                self.board.put(message)
        self.board.fail("rank 0 is gone")

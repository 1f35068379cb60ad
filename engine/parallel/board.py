"""How ranks on several machines find each other.

What each rank publishes, above all its address and port, goes through rank 0 over the existing
connections, so nothing else listens.

    rank 2 ── Posted ──► rank 0 ── Posted ──► rank 1, 3        until all have met
    all    ── Met ─────► rank 0 ── Met ─────► all              then passes follow

To torch's process groups this is a store: they write values under keys, and wait for those of
others.
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

_distributed: Any = distributed  # the stubs hide this class
_Store: Any = _distributed.Store
_TIMEOUT_S = 60.0  # all have loaded by then


class Board(_Store):
    """A ``torch.distributed.Store`` with a copy on every rank.

    Args:
        tell: sends a new value to the other ranks.
    """

    def __init__(self, tell: Callable[[Posted], None]) -> None:
        super().__init__()
        self._tell = tell
        self._values: dict[str, bytes] = {}
        self._news = threading.Condition()
        self._problem: str | None = None

    def put(self, posted: Posted) -> None:
        """Add a value from another rank."""
        with self._news:
            self._values[posted.key] = posted.value
            self._news.notify_all()

    def fail(self, problem: str) -> None:
        """Make all waits fail with ``problem``, because no more values will come."""
        with self._news:
            self._problem = problem
            self._news.notify_all()

    def set(self, key: str, value: bytes) -> None:
        """See ``Store``."""
        posted = Posted(key, bytes(value))
        self.put(posted)
        self._tell(posted)

    def get(self, key: str) -> bytes:
        """See ``Store``; waits for the value."""
        self.wait([key])
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        """See ``Store``."""
        with self._news:
            return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See ``Store``. Raises RuntimeError, as torch does, when a value does not come."""
        limit_s = _TIMEOUT_S if timeout is None else min(timeout.total_seconds(), _TIMEOUT_S)

        def is_decided() -> bool:
            return self._problem is not None or all(key in self._values for key in keys)

        with self._news:
            if not self._news.wait_for(is_decided, limit_s):
                raise RuntimeError(f"the others did not come to meet within {limit_s:g} s")
            if self._problem is not None and any(key not in self._values for key in keys):
                raise RuntimeError(self._problem)


class Relay:
    """Rank 0's board, which relays all values until all ranks have met.

    Args:
        ranks: the others.
        said: the messages of each; nothing else reads them meanwhile.
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
        """Wait until all have met. Raises EngineDead when a rank is gone."""
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
            pass  # its socket was shut down, and it has ended too
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
                    with contextlib.suppress(OSError):  # its reader reports the loss
                        rank.socket.sendall(frame)


class Attendance:
    """Another rank's board, kept up to date until rank 0 reports that all have met.

    Args:
        messages: from rank 0; nothing else reads them meanwhile.
        send: sends to rank 0.
    """

    def __init__(self, messages: Iterator[ToRank], send: Callable[[FromRank], None]) -> None:
        self.board = Board(send)
        self._messages = messages
        self._send = send
        self._thread = threading.Thread(target=self._hear, name="meeting", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Report that this rank has met the others; return when all have, or rank 0 is gone."""
        self._send(Met())
        self._thread.join()

    def _hear(self) -> None:
        for message in self._messages:
            if isinstance(message, Met):
                return
            if isinstance(message, Posted):
                self.board.put(message)
        self.board.fail("rank 0 is gone")

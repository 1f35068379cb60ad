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
from engine.parallel.frames import FromRank, RendezvousDone, StoreValue, ToRank
from engine.parallel.ranks import Rank

_distributed: Any = distributed  # the stubs hide this class
_Store: Any = _distributed.Store
_TIMEOUT_S = 60.0  # all have loaded by then


class ReplicatedStore(_Store):
    """A ``torch.distributed.Store`` with a copy on every rank.

    Args:
        publish: sends a new value to the other ranks.
    """

    def __init__(self, publish: Callable[[StoreValue], None]) -> None:
        super().__init__()
        self._publish = publish
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._problem: str | None = None

    def put(self, posted: StoreValue) -> None:
        """Add a value from another rank."""
        with self._changed:
            self._values[posted.key] = posted.value
            self._changed.notify_all()

    def fail(self, problem: str) -> None:
        """Make all waits fail with ``problem``, because no more values will come."""
        with self._changed:
            self._problem = problem
            self._changed.notify_all()

    def set(self, key: str, value: bytes) -> None:
        """See ``Store``."""
        posted = StoreValue(key, bytes(value))
        self.put(posted)
        self._publish(posted)

    def get(self, key: str) -> bytes:
        """See ``Store``; waits for the value."""
        self.wait([key])
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        """See ``Store``."""
        with self._changed:
            return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See ``Store``. Raises RuntimeError, as torch does, when a value does not come."""
        limit_s = _TIMEOUT_S if timeout is None else min(timeout.total_seconds(), _TIMEOUT_S)

        def is_decided() -> bool:
            return self._problem is not None or all(key in self._values for key in keys)

        with self._changed:
            if not self._changed.wait_for(is_decided, limit_s):
                raise RuntimeError(f"the others did not come to meet within {limit_s:g} s")
            if self._problem is not None and any(key not in self._values for key in keys):
                raise RuntimeError(self._problem)


class StoreRelay:
    """Rank 0's board, which relays all values until all ranks have met.

    Args:
        ranks: the others.
        messages: the messages of each; nothing else reads them meanwhile.
    """

    def __init__(self, ranks: Sequence[Rank], messages: Sequence[Iterator[FromRank]]) -> None:
        self.store = ReplicatedStore(self._publish)
        self._ranks = ranks
        self._sending = threading.Lock()
        self._problem: str | None = None
        self._threads = [
            threading.Thread(target=self._read_messages, args=pair, name="meeting", daemon=True)
            for pair in zip(ranks, messages, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Wait until all have met. Raises EngineDead when a rank is gone."""
        for thread in self._threads:
            thread.join()
        if self._problem is not None:
            raise EngineDead(self._problem)
        self._send(RendezvousDone(), None)

    def _read_messages(self, rank: Rank, messages: Iterator[FromRank]) -> None:
        problem = f"{rank.name} ended before it had met the others"
        try:
            for message in messages:
                if isinstance(message, RendezvousDone):
                    return
                self._handle_message(message, rank)
        except FrameError as error:
            problem = f"{rank.name}: {error}"
        except OSError:
            pass  # its socket was shut down, and it has ended too
        self._problem = self._problem or problem
        self.store.fail(problem)

    def _handle_message(self, message: FromRank, rank: Rank) -> None:
        if not isinstance(message, StoreValue):
            raise FrameError(f"{type(message).__name__} is none of a meeting")
        self.store.put(message)
        self._send(message, rank)

    def _publish(self, posted: StoreValue) -> None:
        self._send(posted, None)

    def _send(self, message: StoreValue | RendezvousDone, source: Rank | None) -> None:
        frame = encode(message)
        with self._sending:
            for rank in self._ranks:
                if rank is not source:
                    with contextlib.suppress(OSError):  # its reader reports the loss
                        rank.socket.sendall(frame)


class FollowerStore:
    """Another rank's board, kept up to date until rank 0 reports that all have met.

    Args:
        messages: from rank 0; nothing else reads them meanwhile.
        send: sends to rank 0.
    """

    def __init__(self, messages: Iterator[ToRank], send: Callable[[FromRank], None]) -> None:
        self.store = ReplicatedStore(send)
        self._messages = messages
        self._send = send
        self._thread = threading.Thread(target=self._read_messages, name="meeting", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Report that this rank has met the others; return when all have, or rank 0 is gone."""
        self._send(RendezvousDone())
        self._thread.join()

    def _read_messages(self) -> None:
        for message in self._messages:
            if isinstance(message, RendezvousDone):
                return
            if isinstance(message, StoreValue):
                self.store.put(message)
        self.store.fail("rank 0 is gone")

"""The environment of batches: stores, handlers, and limits of concurrency."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from server.batches.line_execution import LineHandler
from server.store.batches import BatchStore, StoredBatch
from server.store.files import FileStore

_THROTTLED_POLL_S = 0.05


@dataclass(frozen=True)
class BatchEnvironment:
    """The environment that batches run in."""

    files: FileStore
    batches: BatchStore
    slots: SharedSlots
    handler_for: Callable[[StoredBatch], LineHandler]
    has_model: Callable[[str], bool]
    max_line_bytes: int


class SharedSlots:
    """Slots for lines, granted in the order of the requests for them.

    While other requests are served, only a quarter of the slots is used: lines yield to other
    sequences in the engine, but each makes the steps a little longer.

    Args:
        limit: lines at once.
        is_busy: whether other requests are served.
    """

    def __init__(self, limit: int, is_busy: Callable[[], bool]) -> None:
        self._limit = limit
        self._is_busy = is_busy
        self._num_taken = 0
        self._queue_lock = asyncio.Lock()
        self._freed = asyncio.Event()

    async def acquire(self) -> None:
        """Wait for a slot."""
        async with self._queue_lock:
            while self._num_taken >= self._allowed():
                self._freed.clear()
                wait_s = None if self._num_taken >= self._limit else _THROTTLED_POLL_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._freed.wait()
            self._num_taken += 1

    def release(self) -> None:
        """Release a slot."""
        self._num_taken -= 1
        self._freed.set()

    def _allowed(self) -> int:
        return max(1, self._limit // 4) if self._is_busy() else self._limit

"""The background task that finds unowned batches and runs them in idle capacity."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from server.batches.environment import BatchEnvironment
from server.batches.lock import BatchLock
from server.batches.run import BatchRun
from server.store.batches import ACTIVE_STATUSES, StoredBatch
from server.store.database import StoreError

_POLL_S = 2.0  # between polls for batches of other processes
_SWEEP_S = 3600.0
_MAX_BATCHES = 8  # at once; they take turns at the slots
_log = logging.getLogger(__name__)


class BatchRunner:
    """Runs until cancelled; another runner can resume its batches.

    Args:
        env: the environment of batches.
        may_run: whether batches may start: false before a model is loaded and during shutdown.
    """

    def __init__(self, env: BatchEnvironment, may_run: Callable[[], bool]) -> None:
        self._env = env
        self._may_run = may_run
        self._running: dict[str, asyncio.Task[None]] = {}
        self._next_sweep_s = 0.0  # time.monotonic()

    async def run(self) -> None:
        """Look for batches repeatedly."""
        news = self._env.batches.updated
        try:
            while True:
                try:
                    await self._poll()
                except StoreError:
                    pass  # already logged; the next poll retries
                except Exception:
                    _log.exception("looking for batches failed")
                # Not wait_for: before Python 3.12 it loses a cancellation that coincides with the
                # event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await news.wait()
        finally:
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll(self) -> None:
        batches = self._env.batches
        # In any case, or the wait in ``run`` would never wait again.
        batches.updated.clear()
        if not (self._may_run() and batches.may_have_batches()):
            return
        if time.monotonic() >= self._next_sweep_s:
            self._next_sweep_s = time.monotonic() + _SWEEP_S
            await self._env.files.sweep()
        for batch in await batches.list_active():
            if len(self._running) >= _MAX_BATCHES:
                break
            if batch.id not in self._running:
                lock = BatchLock.acquire(batches.locks, batch.id)
                if lock is not None:
                    self._running[batch.id] = asyncio.create_task(self._run(batch.id, lock))

    async def _run(self, id: str, lock: BatchLock) -> None:
        ended = is_done = False
        try:
            # Its state now that the lock is held: another process may have advanced it.
            batch = await self._find(id)
            if batch is not None:
                await BatchRun(self._env, batch).run()
            ended = await self._find(id) is None
            is_done = True
        except StoreError:
            pass  # retried at the next poll
        except Exception:
            _log.exception("batch %s could not be run", id)
        finally:
            lock.release(ended=ended)
            del self._running[id]
            if is_done:  # else at the next poll: what failed at once would fail again at once
                self._env.batches.updated.set()

    async def _find(self, id: str) -> StoredBatch | None:
        """The batch, unless it has ended."""
        found = await self._env.batches.list_active()
        return next(
            (batch for batch in found if batch.id == id and batch.status in ACTIVE_STATUSES), None
        )

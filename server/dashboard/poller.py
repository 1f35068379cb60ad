"""Rate-limited, shared snapshots of an engine for all open dashboards."""

from __future__ import annotations

import asyncio
import contextlib
import time

from engine.client import EngineClient
from engine.snapshot import Snapshot
from server.state import ServerState

_MIN_INTERVAL_S = 0.2  # between two snapshots of this process, however many pages are open
_TIMEOUT_S = 2.0  # for a step to end


class SnapshotPoller:
    """Takes snapshots of one engine for one API process. Belongs to its event loop.

    The engine answers between two steps. While an answer is pending no other is requested: later
    callers wait for the same one, or time out without it.

    Args:
        state: the application's.
        number: of the engine, among those of the server.
    """

    def __init__(self, state: ServerState, number: int) -> None:
        self._state = state
        self._number = number
        self.engine: EngineClient = state.engine.members[number]
        self._task: asyncio.Task[Snapshot] | None = None
        self._requested_s = 0.0
        # By id: how long an answer was complete before its client had read it.
        self.unread_s: dict[str, float] = {}
        self.num_restarts = 0  # of the engine

    async def poll(self) -> Snapshot | None:
        """A snapshot, at most a fraction of a second old; None while the engine is busy.

        Raises:
            EngineDead: the engine is gone, or restarting.
        """
        now_s = time.monotonic()
        task = self._task
        if task is None or (task.done() and now_s - self._requested_s >= _MIN_INTERVAL_S):
            self._requested_s = now_s
            task = self._task = asyncio.create_task(self._take_snapshot())
            # Its error is no news if every caller has timed out by then.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        done, _ = await asyncio.wait([task], timeout=_TIMEOUT_S)
        return task.result() if done else None

    def close(self) -> None:
        """Stop taking snapshots."""
        if self._task is not None:
            self._task.cancel()

    async def _take_snapshot(self) -> Snapshot:
        snapshot = await self.engine.snapshot()
        self._update_unread(snapshot)
        # An API worker does not restart the engine itself: who does knows the number.
        with contextlib.suppress(TimeoutError):
            values = await self._state.collect_metrics()
            self.num_restarts = values.engines[self._number].num_restarts
        return snapshot

    def _update_unread(self, snapshot: Snapshot) -> None:
        """Record which of this process's clients have not read a complete answer."""
        is_live = self._state.metrics.is_live
        known = self.unread_s
        self.unread_s = {}
        for life in snapshot.requests:
            if life.ended_s is None:
                continue
            if is_live(life.id):
                self.unread_s[life.id] = max(0.0, snapshot.now_s - life.ended_s)
            elif life.id in known:
                self.unread_s[life.id] = known[life.id]

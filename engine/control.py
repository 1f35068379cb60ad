"""Questions from a client to its engine, apart from requests.

Used by all clients. Everything here belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from engine.errors import EngineError
from engine.frames import (
    ControlReply,
    ControlRequest,
    GetSnapshot,
    Reload,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from engine.snapshot import Snapshot
from engine.types import EngineInfo, Trace


class ControlMethods(ABC):
    """The control methods of :class:`engine.client.EngineClient`; see there for details."""

    @property
    @abstractmethod
    def info(self) -> EngineInfo:
        """See ``EngineClient``."""

    @abstractmethod
    async def _control_call(self, request: ControlRequest) -> ControlReply:
        """Ask the engine and await the answer. Raises the answer's failure, or EngineDead."""

    async def start_profile(self, num_steps: int) -> None:
        """Record the next steps."""
        await self._control_call(StartProfile(num_steps))

    async def stop_profile(self) -> Trace:
        """Stop recording."""
        trace = (await self._control_call(StopProfile())).trace
        assert trace is not None
        return trace

    async def snapshot(self) -> Snapshot:
        """A snapshot of the engine."""
        snapshot = (await self._control_call(GetSnapshot())).snapshot
        assert snapshot is not None
        return snapshot

    async def sleep(self, level: int, timeout_s: float) -> None:
        """Free memory."""
        await self._control_call(Sleep(level, timeout_s))

    async def wake(self) -> None:
        """Allocate it again."""
        await self._control_call(Wake())

    async def reload(self, model: str | None, timeout_s: float) -> EngineInfo:
        """Replace the weights."""
        await self._control_call(Reload(model, timeout_s))
        return self.info


class PendingControlCalls:
    """Unanswered control requests, in the order in which the engine will answer them."""

    def __init__(self) -> None:
        self._pending: deque[asyncio.Future[ControlReply]] = deque()

    async def call(
        self, request: ControlRequest, send: Callable[[ControlRequest], None]
    ) -> ControlReply:
        """Send ``request`` and await the answer. Raises the answer's failure."""
        answer = asyncio.get_running_loop().create_future()
        self._pending.append(answer)
        send(request)
        answered = await answer
        if answered.failure is not None:
            raise answered.failure.to_error()
        return answered

    def resolve(self, reply: ControlReply) -> None:
        """Deliver the reply to the oldest request."""
        if not self._pending:
            return  # a late reply: all requests were failed
        answer = self._pending.popleft()
        if not answer.done():  # else the asker was cancelled
            answer.set_result(reply)

    def fail_all(self, error: EngineError) -> None:
        """Fail all requests, since no replies will come."""
        while self._pending:
            answer = self._pending.popleft()
            if not answer.done():
                answer.set_exception(error)

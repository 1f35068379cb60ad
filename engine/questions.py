"""What a client asks its engine, besides requests.

Used by all clients. Everything here belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from engine.errors import EngineError
from engine.frames import (
    Answered,
    Look,
    Question,
    Reload,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from engine.snapshot import Snapshot
from engine.types import EngineInfo, Trace


class Asker(ABC):
    """The part of a :class:`engine.client.EngineClient` that asks; its docstrings tell more."""

    @property
    @abstractmethod
    def info(self) -> EngineInfo:
        """See ``EngineClient``."""

    @abstractmethod
    async def _ask(self, question: Question) -> Answered:
        """Ask the engine and wait for the answer. Raises the failure it may be, or EngineDead."""

    async def start_profile(self, num_steps: int) -> None:
        """Record the next steps."""
        await self._ask(StartProfile(num_steps))

    async def stop_profile(self) -> Trace:
        """Record no longer."""
        trace = (await self._ask(StopProfile())).trace
        assert trace is not None
        return trace

    async def look(self) -> Snapshot:
        """How the engine stands."""
        snapshot = (await self._ask(Look())).snapshot
        assert snapshot is not None
        return snapshot

    async def sleep(self, level: int, timeout_s: float) -> None:
        """Give memory back."""
        await self._ask(Sleep(level, timeout_s))

    async def wake(self) -> None:
        """Take it again."""
        await self._ask(Wake())

    async def reload(self, model: str | None, timeout_s: float) -> EngineInfo:
        """Exchange the weights."""
        await self._ask(Reload(model, timeout_s))
        return self.info


class Questions:
    """Those that have not been answered, in the order in which the engine will answer them."""

    def __init__(self) -> None:
        self._open: deque[asyncio.Future[Answered]] = deque()

    async def ask(self, question: Question, send: Callable[[Question], None]) -> Answered:
        """Send ``question`` and wait for the answer. Raises the failure it may be."""
        answer = asyncio.get_running_loop().create_future()
        self._open.append(answer)
        send(question)
        answered = await answer
        if answered.failure is not None:
            raise answered.failure.to_error()
        return answered

    def settle(self, answered: Answered) -> None:
        """The oldest one has been answered."""
        if not self._open:
            return  # an answer that came too late: all were failed
        answer = self._open.popleft()
        if not answer.done():  # else whoever asked has been cancelled
            answer.set_result(answered)

    def fail_all(self, error: EngineError) -> None:
        """No answer will come."""
        while self._open:
            answer = self._open.popleft()
            if not answer.done():
                answer.set_exception(error)

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
    """The question methods of :class:`engine.client.EngineClient`; see there for details."""

    @property
    @abstractmethod
    def info(self) -> EngineInfo:
        """See ``EngineClient``."""

    @abstractmethod
    async def _ask(self, question: Question) -> Answered:
        """Ask the engine and await the answer. Raises the answer's failure, or EngineDead."""

    async def start_profile(self, num_steps: int) -> None:
        """Record the next steps."""
        await self._ask(StartProfile(num_steps))

    async def stop_profile(self) -> Trace:
        """Stop recording."""
        trace = (await self._ask(StopProfile())).trace
        assert trace is not None
        return trace

    async def look(self) -> Snapshot:
        """A snapshot of the engine."""
        snapshot = (await self._ask(Look())).snapshot
        assert snapshot is not None
        return snapshot

    async def sleep(self, level: int, timeout_s: float) -> None:
        """Free memory."""
        await self._ask(Sleep(level, timeout_s))

    async def wake(self) -> None:
        """Allocate it again."""
        await self._ask(Wake())

    async def reload(self, model: str | None, timeout_s: float) -> EngineInfo:
        """Replace the weights."""
        await self._ask(Reload(model, timeout_s))
        return self.info


class Questions:
    """Unanswered questions, in the order in which the engine will answer them."""

    def __init__(self) -> None:
        self._open: deque[asyncio.Future[Answered]] = deque()

    async def ask(self, question: Question, send: Callable[[Question], None]) -> Answered:
        """Send ``question`` and await the answer. Raises the answer's failure."""
        answer = asyncio.get_running_loop().create_future()
        self._open.append(answer)
        send(question)
        answered = await answer
        if answered.failure is not None:
            raise answered.failure.to_error()
        return answered

    def settle(self, answered: Answered) -> None:
        """Deliver the answer to the oldest question."""
        if not self._open:
            return  # a late answer: all questions were failed
        answer = self._open.popleft()
        if not answer.done():  # else the asker was cancelled
            answer.set_result(answered)

    def fail_all(self, error: EngineError) -> None:
        """Fail all questions, since no answers will come."""
        while self._open:
            answer = self._open.popleft()
            if not answer.done():
                answer.set_exception(error)

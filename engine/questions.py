"""What a client has asked its engine, besides requests, and has not been told yet.

Used by all clients. Everything here belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from engine.errors import EngineError
from engine.frames import Answered, Question


class Questions:
    """Those that are open, in the order in which the engine will answer them."""

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

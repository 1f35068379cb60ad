"""Operations on all engines at once, and what happens if one of them fails.

If an engine dies over an operation, it is repeated once its successor is ready; engines that have
been given up are skipped. If one refuses, the others are restored to their previous state, so that
the engines of a server do not diverge.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from engine.errors import EngineDead, ProfileRefused
from engine.remote import RemoteClient
from engine.types import Trace

logger = logging.getLogger(__name__)

_RETRY_INTERVAL_S = 1.0  # between checks of an engine that reported that it is dying
_AnswerT = TypeVar("_AnswerT")


class ReplicaCoordinator:
    """Operates on all ``engines``. Belongs to one event loop."""

    def __init__(self, engines: Sequence[RemoteClient]) -> None:
        self._engines = engines
        self._changed: asyncio.Event | None = None

    def notify_change(self) -> None:
        """Note that an engine has died, returned or changed its activity."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def sleep(self, level: int, timeout_s: float) -> None:
        """Put all to sleep; if one fails, wake those that did sleep. Raises that one's error."""
        awake = [engine for engine in self._engines if engine.activity == "serving"]
        problem = await self._call_all(self._engines, lambda one: one.sleep(level, timeout_s))
        if problem is not None:
            await self._undo([one for one in awake if one.activity == "asleep"], RemoteClient.wake)
            raise problem

    async def wake(self) -> None:
        """Wake all; if one fails, put those that woke back to sleep. Raises that one's error."""
        asleep = [engine for engine in self._engines if engine.activity == "asleep"]
        problem = await self._call_all(self._engines, RemoteClient.wake)
        if problem is not None:
            woken = [one for one in asleep if one.activity == "serving"]
            await self._undo(woken, lambda one: one.sleep(1, 0.0))
            raise problem

    async def reload(self, model: str | None, timeout_s: float) -> None:
        """Replace the weights of all engines; if one fails, restore those of the others.

        All begin at once, so that no later request is served by the old weights.

        Raises the error of the one that failed.
        """
        former = [(engine, engine.info) for engine in self._engines if not engine.dead]
        replies = await asyncio.gather(
            *(
                self._call(engine, partial(_reload, model, timeout_s, info.generation))
                for engine, info in former
            ),
            return_exceptions=True,
        )
        problem = next((answer for answer in replies if isinstance(answer, BaseException)), None)
        if problem is not None:
            for engine, was in former:
                if engine.info.generation != was.generation:
                    again = partial(_reload, was.model, timeout_s, engine.info.generation)
                    await self._undo([engine], again)
            raise problem

    async def start_profile(self, num_steps: int) -> None:
        """Record on all engines that are alive; if one fails, on none. Raises that one's error."""
        present = [engine for engine in self._engines if engine.alive]
        if not present:
            raise EngineDead("all engines are being restarted")
        replies = await asyncio.gather(
            *(engine.start_profile(num_steps) for engine in present), return_exceptions=True
        )
        problems = [answer for answer in replies if isinstance(answer, BaseException)]
        if problems:
            begun = [one for one, answer in zip(present, replies, strict=True) if answer is None]
            await self._undo(begun, RemoteClient.stop_profile)
            raise problems[0]

    async def stop_profile(self) -> Trace:
        """End the recording; returns the first engine's trace, which names the others' files.

        Raises:
            ProfileRefused: none of them has recorded.
            RequestFailed: a trace could not be written.
            EngineDead: no engine is alive.
        """
        present = [engine for engine in self._engines if engine.alive]
        replies = await asyncio.gather(
            *(engine.stop_profile() for engine in present), return_exceptions=True
        )
        traces = [answer for answer in replies if isinstance(answer, Trace)]
        problems = [answer for answer in replies if isinstance(answer, BaseException)]
        for problem in problems:
            if not isinstance(problem, (ProfileRefused, EngineDead)):
                raise problem
        if not traces:
            raise problems[0] if problems else EngineDead("all engines are being restarted")
        others = tuple(trace.path for trace in traces[1:])
        return msgspec.structs.replace(traces[0], others=others)

    # ------------------------------------------------------------ helpers

    async def _call_all(
        self,
        engines: Sequence[RemoteClient],
        call: Callable[[RemoteClient], Awaitable[object]],
    ) -> BaseException | None:
        """Ask all at once; returns the first error among their answers."""
        replies = await asyncio.gather(
            *(self._call(engine, call) for engine in engines), return_exceptions=True
        )
        return next((answer for answer in replies if isinstance(answer, BaseException)), None)

    async def _call(
        self, engine: RemoteClient, call: Callable[[RemoteClient], Awaitable[_AnswerT]]
    ) -> _AnswerT | None:
        """The answer of ``engine`` or a successor; None if it has been given up."""
        while not engine.dead:
            if engine.alive:
                try:
                    return await call(engine)
                except EngineDead as error:
                    logger.warning("an engine died over a request and is asked again: %s", error)
            if self._changed is None:
                self._changed = asyncio.Event()
            try:
                async with asyncio.timeout(_RETRY_INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return None

    async def _undo(
        self,
        engines: Sequence[RemoteClient],
        call: Callable[[RemoteClient], Awaitable[object]],
    ) -> None:
        problem = await self._call_all(engines, call)
        if problem is not None:
            logger.error("an engine could not be brought back to what it did: %s", problem)


async def _reload(
    model: str | None, timeout_s: float, generation: int, engine: RemoteClient
) -> None:
    """Reload ``engine`` if it still has the weights of ``generation``.

    If it died over the request it may have loaded the new ones before, and its successor has the
    same weights as it had.
    """
    if engine.info.generation == generation:
        await engine.reload(model, timeout_s)

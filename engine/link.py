"""A client's connection to one engine process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from engine.client import LoadProgress
from engine.errors import EngineDead, EngineError, ModelLoadError
from engine.frames import (
    Abort,
    Answered,
    Fatal,
    FrameError,
    FrameReader,
    Loading,
    Message,
    Output,
    Question,
    Ready,
    Submit,
    ToEngine,
    encode,
)
from engine.questions import Questions
from engine.types import EngineInfo, Trace

logger = logging.getLogger(__name__)


class EngineLink(asyncio.Protocol):
    """Frames to and from one engine process.

    ``ready`` gets the engine's info, or the error that kept it from loading; ``lost`` is done when
    the engine dies later than that.

    Args:
        take: called with each step's output.
        on_progress: told how far the loading has come.
    """

    def __init__(
        self, take: Callable[[Output], None], on_progress: LoadProgress | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[EngineInfo] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        self.open = False  # between the two
        self._take = take
        self._on_progress = on_progress
        self._reader = FrameReader()
        self._transport: asyncio.WriteTransport | None = None
        self._outbox: list[ToEngine] = []
        self._fatal: Fatal | None = None
        self._questions = Questions()

    # ------------------------------------------------------------ out

    def send(self, message: ToEngine) -> None:
        """Send ``message`` before the event loop next waits, with what else there is by then."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self.flush)
        self._outbox.append(message)

    async def ask(self, question: Question) -> Trace | None:
        """Put ``question`` and wait for the answer. Raises EngineDead, or the answer's error."""
        return await self._questions.ask(question, self.send)

    def flush(self) -> None:
        """Send what has gathered, neighbouring submissions as one."""
        outbox, self._outbox = self._outbox, []
        if self._transport is None or self._transport.is_closing():
            return
        merged: list[ToEngine] = []
        for message in outbox:
            last = merged[-1] if merged else None
            if isinstance(message, Submit) and isinstance(last, Submit):
                merged[-1] = Submit(last.requests + message.requests)
            elif isinstance(message, Abort) and isinstance(last, Abort):
                merged[-1] = Abort(last.ids + message.ids)
            else:
                merged.append(message)
        if merged:
            self._transport.write(b"".join(map(encode, merged)))

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------ in

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop once."""
        # A cast, not a check: uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop with whatever has come."""
        try:
            for message in self._reader.feed(data):
                self._receive(message)
        except FrameError as error:
            logger.critical("the engine process sent something else than a frame: %s", error)
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop at end-of-file: the engine is gone."""
        self.open = False
        if not self.ready.done():
            self.ready.set_exception(self._reason())
        if not self.lost.done():
            self.lost.set_result(None)
        self._questions.fail_all(EngineDead("the engine has gone without an answer"))

    def _receive(self, message: Message) -> None:
        if isinstance(message, Output):
            self._take(message)
        elif isinstance(message, Loading):
            if self._on_progress is not None:
                self._on_progress(message.fraction, message.what)
        elif isinstance(message, Ready):
            if not self.ready.done():
                self.open = True
                self.ready.set_result(message.info)
        elif isinstance(message, Answered):
            self._questions.settle(message)
        elif isinstance(message, Fatal):
            self._fatal = message
            if self.ready.done():  # before that, whoever waits for it is told, and nobody twice
                logger.error("the engine ends: %s", message.message)
        else:
            raise FrameError(f"{type(message).__name__} is not for a client")

    def _reason(self) -> EngineError:
        if self._fatal is None:
            return EngineDead("the engine process ended while it was loading")
        return read_fatal(self._fatal)


def read_fatal(fatal: Fatal) -> EngineError:
    """The error that a ``Fatal`` tells of."""
    kind = ModelLoadError if fatal.kind == "ModelLoadError" else EngineDead
    return kind(fatal.message)

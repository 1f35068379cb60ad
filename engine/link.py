"""A client's connection to one engine process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from engine.client import LoadProgress
from engine.control import PendingControlCalls
from engine.errors import EngineDead, EngineError, ModelLoadError
from engine.frames import (
    Abort,
    Begun,
    ControlReply,
    ControlRequest,
    Fatal,
    FrameError,
    FrameReader,
    HungUp,
    Loading,
    Message,
    Output,
    Ping,
    Pong,
    Ready,
    Submit,
    ToEngine,
    encode,
)
from engine.submission import has_media
from engine.types import EngineInfo

logger = logging.getLogger(__name__)

_PING_AFTER_S = 1.0  # silence after which the engine process is pinged
_PONG_TIMEOUT_S = 5.0  # time for it to answer


class EngineLink(asyncio.Protocol):
    """Frames to and from one engine process.

    ``ready`` receives the engine's info, or the error that kept it from loading. ``lost`` is done
    when the connection ends after that: the engine has died, unless ``was_hung_up``. While the
    engine is ready, a process that sends nothing is pinged, because one that is stopped or starved
    of CPU keeps its sockets open.

    Args:
        on_output: called with each step's output, and with the requests that a step begins.
        on_progress: called with the progress of loading.
        on_change: called with the loaded model and the engine's activity, when it is ready and
            whenever either changes.
        name: the engine's name, for messages.
    """

    def __init__(
        self,
        on_output: Callable[[Output | Begun], None],
        on_progress: LoadProgress | None = None,
        on_change: Callable[[Ready], None] = lambda ready: None,
        name: str = "the engine",
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[EngineInfo] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        self.open = False  # ready and not lost
        self.was_hung_up = False  # lost, because messages were not read in time
        self._on_output = on_output
        self._on_progress = on_progress
        self._on_change = on_change
        self._name = name
        self._reader = FrameReader()
        self._transport: asyncio.WriteTransport | None = None
        self._outbox: list[ToEngine] = []
        self._fatal: Fatal | None = None
        self._control_calls = PendingControlCalls()
        self._last_received_s = loop.time()  # when the engine last sent something
        self._pinged_s: float | None = None  # when it was pinged; None: no ping is unanswered
        self._timer: asyncio.TimerHandle | None = None

    @property
    def responsive(self) -> bool:
        """Whether the last ping was answered or may still be."""
        asked_s = self._pinged_s
        return asked_s is None or asyncio.get_running_loop().time() - asked_s < _PONG_TIMEOUT_S

    # ------------------------------------------------------------ out

    def send(self, message: ToEngine) -> None:
        """Send ``message`` before the event loop next waits, batched with others."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self.flush)
        self._outbox.append(message)

    async def call(self, request: ControlRequest) -> ControlReply:
        """Send ``request`` and await the answer. Raises EngineDead or the answer's error."""
        encode(request)  # encoding errors surface here, not in a flush with other messages
        return await self._control_calls.call(request, self.send)

    def flush(self) -> None:
        """Send the queued messages, merging adjacent submissions and adjacent aborts."""
        outbox, self._outbox = self._outbox, []
        if self._transport is None or self._transport.is_closing():
            return
        merged: list[ToEngine] = []
        for message in outbox:
            last = merged[-1] if merged else None
            is_large = isinstance(message, Submit) and has_media(message)
            if isinstance(message, Submit) and isinstance(last, Submit) and not is_large:
                merged[-1] = Submit(last.requests + message.requests)
            elif isinstance(message, Abort) and isinstance(last, Abort):
                merged[-1] = Abort(last.ids + message.ids)
            else:
                merged.append(message)
        if merged:
            self._transport.write(b"".join(map(encode, merged)))

    @property
    def has_reason(self) -> bool:
        """Whether the process said why it ends."""
        return self._fatal is not None

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------ in

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called once by the event loop."""
        # A cast, not a check: uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop with received data."""
        self._last_received_s, self._pinged_s = asyncio.get_running_loop().time(), None
        try:
            for message in self._reader.feed(data):
                self._handle_message(message)
        except FrameError as error:
            logger.critical("%s sent something else than a frame: %s", self._name, error)
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop at end-of-file."""
        self.open = False
        if self._timer is not None:
            self._timer.cancel()
        if not self.ready.done():
            self.ready.set_exception(self._load_error())
        if not self.lost.done():
            self.lost.set_result(None)
        self._control_calls.fail_all(EngineDead("the engine has gone without an answer"))

    def _handle_message(self, message: Message) -> None:
        if isinstance(message, Output | Begun):
            self._on_output(message)
        elif isinstance(message, Loading):
            if self._on_progress is not None:
                self._on_progress(message.fraction, message.what)
        elif isinstance(message, Ready):
            self._on_change(message)
            if not self.ready.done():
                self.open = True
                self.ready.set_result(message.info)
                self._check_liveness()
        elif isinstance(message, ControlReply):
            self._control_calls.resolve(message)
        elif isinstance(message, Pong):
            pass  # receiving it is enough
        elif isinstance(message, HungUp):
            logger.warning("%s did not wait for its output to be read", self._name)
            self.was_hung_up = True
        elif isinstance(message, Fatal):
            self._fatal = message
            if self.ready.done():  # before that, the awaiter of ``ready`` gets the error
                logger.error("%s ends: %s", self._name, message.message)
        else:
            raise FrameError(f"{type(message).__name__} is not for a client")

    def _check_liveness(self) -> None:
        """Ping a process that has been silent, and schedule the next check."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if self._pinged_s is None and now_s - self._last_received_s >= _PING_AFTER_S:
            self._pinged_s = now_s
            self.send(Ping())
        self._timer = loop.call_later(_PING_AFTER_S, self._check_liveness)

    def _load_error(self) -> EngineError:
        if self._fatal is None:
            return EngineDead("the engine process ended while it was loading")
        return read_fatal(self._fatal)


def read_fatal(fatal: Fatal) -> EngineError:
    """The error that a ``Fatal`` message describes."""
    kind = ModelLoadError if fatal.kind == "ModelLoadError" else EngineDead
    return kind(fatal.message)

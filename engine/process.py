"""An engine in a process of its own, and streams that outlive it.

    API process                                   engine process (engine/worker.py)
    SubprocessClient ── Configure, Submit, Abort, Shutdown ──►  EngineLoop ─ EngineCore
           ▲                  one socket pair                        │
           └────────── Loading, Ready, Output, Fatal ◄───────────────┘

End-of-file is the death notice, in both directions. When the engine dies after it had been ready,
another is started and every live request is submitted again with the output that its stream has
already received; a token depends on the request's seed and its position alone, so each stream
goes on as if nothing had happened. An engine that keeps dying is given up.

Nothing here imports the tensor library.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from engine.client import LoadProgress, RequestStream
from engine.config import EngineConfig
from engine.errors import EngineDead, EngineError, ModelLoadError
from engine.frames import (
    Abort,
    Configure,
    Fatal,
    FrameError,
    FrameReader,
    Loading,
    Message,
    Output,
    Ready,
    Shutdown,
    Submit,
    ToEngine,
    encode,
)
from engine.streams import StreamTable
from engine.types import EngineInfo, EngineOutput, EngineStats, Request

logger = logging.getLogger(__name__)

MAX_CRASHES = 3  # within CRASH_WINDOW_S: no further restart
CRASH_WINDOW_S = 60.0
_EXIT_GRACE_S = 5.0  # from Shutdown to SIGTERM, and from there to SIGKILL
_REAP_GRACE_S = 2.0  # for a process that has closed its socket


class SubprocessClient:
    """A :class:`engine.client.EngineClient` whose engine runs in a child process.

    Args:
        config: what to load; sent to the child.
        runner: ``module:factory`` of the runner, if it is not the engine's own.
    """

    def __init__(self, config: EngineConfig, *, runner: str | None = None) -> None:
        self._config = config
        self._runner = runner
        self._streams = StreamTable(self._abort)
        self._listeners: list[Callable[[EngineOutput], None]] = []
        self._child: _Child | None = None
        self._link: _Connection | None = None  # to the child there is, also while it loads
        self._connection: _Connection | None = None  # the same, once it may be given requests
        self._supervisor: asyncio.Task[None] | None = None
        self._crashes_s: list[float] = []
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._error: EngineError = EngineDead("the engine has not been started")
        self._dead = False
        self.num_restarts = 0  # engines started in place of one that died
        self.num_resumed = 0  # requests that went on in another engine

    @property
    def info(self) -> EngineInfo:
        """What was loaded. Raises EngineDead before ``start`` has returned."""
        if self._info is None:
            raise self._error
        return self._info

    @property
    def stats(self) -> EngineStats:
        """The newest snapshot."""
        return self._stats

    @property
    def alive(self) -> bool:
        """Whether requests can be submitted now: false while the engine loads or restarts."""
        return self._connection is not None and self._connection.open

    @property
    def dead(self) -> bool:
        """Whether the engine has been given up for good."""
        return self._dead

    @property
    def pid(self) -> int | None:
        """The engine's process id, while there is one."""
        return None if self._child is None else self._child.process.pid

    def spawn(self) -> None:
        """Start the child now, so that it loads while the caller goes on; ``start`` awaits it.

        Needs no event loop, and returns as soon as the process exists. Idempotent.
        """
        if self._child is None:
            self._child = _Child(self._config, self._runner)

    async def start(self, on_progress: LoadProgress | None = None) -> EngineInfo:
        """Load the model. Raises ModelLoadError or EngineDead."""
        try:
            connection = await self._connect(on_progress)
        except EngineError as error:
            self._give_up(error)
            raise
        self._connection = connection
        self._error = EngineDead(
            "the engine is being restarted"
        )  # from now on, when it is not open
        self._supervisor = asyncio.create_task(self._supervise(connection))
        return self.info

    def submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        """Queue requests; they are sent when the event loop is next idle.

        Raises:
            EngineDead: the engine is gone, or being restarted.
            ValueError: an id is in use.
        """
        if self._connection is None or not self._connection.open:
            raise self._error
        streams: list[RequestStream] = [self._streams.open(request) for request in requests]
        self._connection.send(Submit(tuple(requests)))
        return streams

    def on_output(self, listener: Callable[[EngineOutput], None]) -> None:
        """Call ``listener`` with each step's output."""
        self._listeners.append(listener)

    async def close(self) -> None:
        """End the engine: after its step, or by force after a grace. Idempotent."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            await asyncio.wait([supervisor])
        if self._connection is not None:
            self._connection.send(Shutdown())
            self._connection.flush()
        elif self._link is not None:
            self._link.close()  # it is still loading: end-of-file ends it
        elif self._child is not None:
            self._child.socket.close()
        self._connection = None
        self._error = EngineDead("the engine was closed")
        self._streams.fail_all(self._error)
        child, self._child = self._child, None
        if child is not None:
            await asyncio.to_thread(child.end, _EXIT_GRACE_S)
        if self._link is not None:
            self._link.close()

    # ------------------------------------------------------------ one engine process

    async def _connect(self, on_progress: LoadProgress | None) -> _Connection:
        """A connection to the child once it has loaded. Raises ModelLoadError or EngineDead."""
        self.spawn()
        assert self._child is not None
        self._link = connection = _Connection(self._take, on_progress)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: connection, sock=self._child.socket)
        self._info = await connection.ready
        return connection

    def _take(self, output: EngineOutput) -> None:
        self._stats = output.stats
        self._streams.dispatch(output)
        for listener in self._listeners:
            listener(output)

    def _abort(self, request_id: str) -> None:
        if self._connection is not None:
            self._connection.send(Abort((request_id,)))

    # ------------------------------------------------------------ when it dies

    async def _supervise(self, connection: _Connection) -> None:
        """Replace each engine that dies, and let every stream go on; or give up."""
        try:
            while True:
                await connection.lost
                self._connection = None
                connection = await self._replace()
                requests = self._streams.resume_all()
                self.num_restarts += 1
                self.num_resumed += len(requests)
                self._connection = connection
                if requests:
                    connection.send(Submit(tuple(requests)))
        except EngineError as error:
            self._give_up(error)
        except Exception as error:
            logger.exception("the engine's supervisor failed")
            self._give_up(EngineDead(f"{type(error).__name__}: {error}"))

    async def _replace(self) -> _Connection:
        """Another engine in place of a dead one. Raises EngineDead when too many have died."""
        while True:
            await self._bury()
            now_s = time.monotonic()
            self._crashes_s = [at for at in self._crashes_s if now_s - at < CRASH_WINDOW_S]
            self._crashes_s.append(now_s)
            if len(self._crashes_s) >= MAX_CRASHES:
                raise EngineDead("the engine keeps dying")
            logger.warning("restarting the engine; %d requests will go on", len(self._streams))
            try:
                return await self._connect(None)
            except EngineError as error:
                logger.error("the engine could not be restarted: %s", error)

    async def _bury(self) -> None:
        """See the dead process out: another must not load before its memory is free."""
        child, self._child = self._child, None
        if child is not None:
            code = await asyncio.to_thread(child.end, _REAP_GRACE_S)
            logger.error("the engine process %d ended with code %s", child.process.pid, code)

    def _give_up(self, error: EngineError) -> None:
        self._dead = True
        self._error = error if isinstance(error, EngineDead) else EngineDead(str(error))
        self._streams.fail_all(self._error)


class _Child:
    """One engine process, and our end of the socket pair."""

    def __init__(self, config: EngineConfig, runner: str | None) -> None:
        self.socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "engine.worker", str(theirs.fileno())]
        if runner is not None:
            command += ["--runner", runner]
        # The kernel kills such a child when the *thread* that started it ends.
        if threading.current_thread() is threading.main_thread():
            command.append("--die-with-parent")
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with theirs:
            self.process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                process_group=0,  # a Ctrl-C at the terminal is ours alone
            )
        with contextlib.suppress(BrokenPipeError):  # it is dead already: end-of-file will tell
            self.socket.sendall(encode(Configure(config)))

    def end(self, grace_s: float) -> int:
        """Wait for its end, and force it when it takes too long; returns the exit code."""
        for force in (self.process.terminate, self.process.kill):
            try:
                return self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                force()
        return self.process.wait()


class _Connection(asyncio.Protocol):
    """Frames to and from one engine process.

    ``ready`` gets the engine's info, or the error that kept it from loading; ``lost`` is done when
    the engine dies later than that.
    """

    def __init__(
        self, take: Callable[[EngineOutput], None], on_progress: LoadProgress | None
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

    # ------------------------------------------------------------ out

    def send(self, message: ToEngine) -> None:
        """Send ``message`` before the event loop next waits, with what else there is by then."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self.flush)
        self._outbox.append(message)

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

    def _receive(self, message: Message) -> None:
        if isinstance(message, Output):
            self._take(message.output)
        elif isinstance(message, Loading):
            if self._on_progress is not None:
                self._on_progress(message.fraction, message.what)
        elif isinstance(message, Ready):
            if not self.ready.done():
                self.open = True
                self.ready.set_result(message.info)
        elif isinstance(message, Fatal):
            self._fatal = message
            if self.ready.done():  # before that, whoever waits for it is told, and nobody twice
                logger.error("the engine ends: %s", message.message)
        else:
            raise FrameError(f"{type(message).__name__} is not for the API process")

    def _reason(self) -> EngineError:
        if self._fatal is None:
            return EngineDead("the engine process ended while it was loading")
        kind = ModelLoadError if self._fatal.kind == "ModelLoadError" else EngineDead
        return kind(self._fatal.message)

"""The engine process: ``python -m engine.worker FD``, started for ``engine/supervisor.py``.

``FD`` is one end of a socket pair; the supervising process holds the other. The first frame, and
nothing else, says what to load. A process can thus be started before that is known (``--ahead``)
and import the tensor library meanwhile. End-of-file means that the supervisor is gone, for whatever
reason. This process then exits at once, even in the middle of a step, and the kernel frees its
resources. SIGINT is ignored, because Ctrl-C is for the supervisor to handle; SIGTERM ends the
process after its step. Requests arrive over the same connection, or over client connections to a
listening socket that came with the first frame.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from engine import logs
from engine.child import die_with_parent
from engine.core import EngineCore
from engine.errors import EngineDead, Failure, ModelLoadError
from engine.frames import (
    Abort,
    Begun,
    Configure,
    ControlRequest,
    Fatal,
    FrameError,
    FrameReader,
    FromEngine,
    Loading,
    Message,
    Output,
    Ping,
    Pong,
    Ready,
    Shutdown,
    Submit,
    encode,
    receive,
)
from engine.gc_tuning import collection_paused, tune_for_serving
from engine.hub import ClientHub
from engine.loop import EngineLoop
from engine.request_intake import OnBegin
from engine.runner import loader_of
from engine.runner.protocol import LoadRunner, SupportsOnLoss
from engine.sleep_controller import ControlCall
from engine.watchdog import StepWatchdog

logger = logging.getLogger(__name__)

Instruction = Submit | Abort | ControlRequest | Shutdown


def main(argv: list[str] | None = None) -> int:
    """Run an engine for the process at the other end of the socket; returns the exit code."""
    parser = argparse.ArgumentParser(prog="engine.worker")
    parser.add_argument("fd", type=int, help="the engine's end of the socket pair")
    parser.add_argument("--ahead", action="store_true", help="it is not known yet what to load")
    parser.add_argument("--die-with-parent", action="store_true")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if args.die_with_parent:
        die_with_parent()
    with socket.socket(fileno=args.fd) as connection:
        connection.setblocking(True)
        try:
            return _serve(connection, is_ahead=args.ahead)
        except (BrokenPipeError, ConnectionResetError):
            return 0  # the other side is gone


def _serve(connection: socket.socket, *, is_ahead: bool) -> int:
    sending = threading.Lock()  # the loop's thread sends output, the inbox's thread answers pings

    def send(message: FromEngine) -> None:
        with sending:
            connection.sendall(encode(message))

    inbox = _Inbox(connection, send)
    inbox.start()

    try:
        configure, core = _load_core(inbox, send, is_ahead=is_ahead)
    except ModelLoadError as error:
        send(Fatal(str(error), "ModelLoadError"))
        return 1
    except Exception as error:
        logger.exception("the engine could not be started")
        send(Fatal(Failure.of(error).message, "EngineDead"))
        return 1

    tune_for_serving()
    hub = None
    if configure.has_listener:
        hub = ClientHub(socket.socket(fileno=inbox.descriptors[0]), core.info)
    emit = hub.emit if hub else lambda output: send(Output(output, time.monotonic()))
    on_begin: OnBegin = (
        hub.begin if hub else lambda begun, back: send(Begun(tuple(begun), tuple(back)))
    )

    def announce(ready: Ready) -> None:
        send(ready)  # our supervisor remembers it for the next engine
        if hub:
            hub.announce(ready)

    watchdog = StepWatchdog(configure.config.step_timeout_s or None)
    loop = EngineLoop(core, emit, watchdog, announce, on_begin)
    signal.signal(signal.SIGTERM, lambda *_: loop.inbox.put(Shutdown()))

    def obey(message: Instruction) -> None:
        loop.inbox.put(
            ControlCall(message, send) if isinstance(message, ControlRequest) else message
        )

    inbox.connect(obey)
    send(Ready(core.info))
    if hub:
        hub.start(loop.inbox.put)
    try:
        loop.run()
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        if not isinstance(error, EngineDead):
            logger.exception("the engine loop failed")
        send(Fatal(Failure.of(error).message, "EngineDead"))
        return 1
    return 0


def _load_core(
    inbox: _Inbox, send: Callable[[FromEngine], None], *, is_ahead: bool
) -> tuple[Configure, EngineCore]:
    """Load the model that the first message names. Only the core holds what was loaded, so that it
    can be freed for sleep. Raises ModelLoadError."""
    configure, load = _prepare(inbox, is_ahead=is_ahead)
    loaded = load(configure.config, lambda fraction, what: send(Loading(fraction, what)))
    if isinstance(loaded, SupportsOnLoss):
        loaded.on_loss(_exit_on_loss)
    return configure, EngineCore(configure.config, loaded)


def _prepare(inbox: _Inbox, *, is_ahead: bool) -> tuple[Configure, LoadRunner]:
    """Receive the configuration and import what it needs; the inbox thread is already running."""
    with collection_paused():
        if is_ahead:
            importlib.import_module("torch")
        first_message = inbox.first()
        logs.configure_engine(first_message.config)
        return first_message, _loader(first_message)


class _Inbox(threading.Thread):
    """Reads the socket from before loading until the end; exits the process at end-of-file.

    It answers pings itself, because the loop may be in the middle of a step. ``descriptors`` are
    those of files that came with the first message.
    """

    def __init__(self, connection: socket.socket, send: Callable[[FromEngine], None]) -> None:
        super().__init__(name="engine-inbox", daemon=True)
        self._connection = connection
        self._send = send
        self._first: queue.SimpleQueue[Configure] = queue.SimpleQueue()
        self._put: Callable[[Instruction], None] | None = None
        self._buffered: list[Message] = []
        self._lock = threading.Lock()
        self.descriptors: list[int] = []

    def first(self) -> Configure:
        """Wait for the supervisor's first message."""
        return self._first.get()

    def connect(self, put: Callable[[Instruction], None]) -> None:
        """Pass all commands to ``put`` from now on, beginning with those already received."""
        with self._lock:
            for message in self._buffered:
                _forward(put, message)
            self._put = put

    def run(self) -> None:
        """Read until end-of-file."""
        reader = FrameReader()
        try:
            messages = receive(self._connection, reader, self.descriptors)
            first = messages.pop(0) if messages else None
            if not isinstance(first, Configure):
                os._exit(1)
            self._first.put(first)
            while True:
                with self._lock:
                    for message in messages:
                        self._handle_message(message)
                messages = receive(self._connection, reader)
                if not messages:
                    break
        except FrameError as error:
            logger.critical("the supervisor sent something else than a frame: %s", error)
            os._exit(1)
        except OSError:
            pass
        # The other side is gone. The main thread may be deep in a step or in loading and cannot be
        # asked to stop. Nothing here outlives the process, and nobody waits for an answer.
        os._exit(0)

    def _handle_message(self, message: Message) -> None:
        if isinstance(message, Ping):
            self._send(Pong())
        elif self._put is not None:
            _forward(self._put, message)
        elif isinstance(message, Shutdown):
            os._exit(0)  # still loading
        else:
            self._buffered.append(message)


def _forward(put: Callable[[Instruction], None], message: Message) -> None:
    if not isinstance(message, Instruction):
        raise FrameError(f"{type(message).__name__} is not for the engine")
    put(message)


def _exit_on_loss(reason: str) -> None:
    """Exit because a part of the model is lost.

    The thread that waits for that part is another one, perhaps in a call that cannot be
    interrupted. The supervisor sees end-of-file and starts another engine.
    """
    logger.critical("the engine ends: %s", reason)
    logging.shutdown()
    os._exit(1)


def _loader(configure: Configure) -> LoadRunner:
    if configure.runner is None:
        return loader_of(configure.config)
    module, _, factory = configure.runner.partition(":")
    return getattr(importlib.import_module(module), factory)


if __name__ == "__main__":
    sys.exit(main())

"""An API worker: ``python -m server.workers.worker FD LISTEN``, started by the supervisor.

``FD`` is its end of a socket pair with the supervisor, ``LISTEN`` the socket on which it accepts
connections. It serves the same application as a single process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from engine import logs
from engine.child import die_with_parent
from engine.config import name_engine
from engine.errors import EngineDead, EngineError
from engine.frames import Fatal
from engine.framing import encode, receive
from engine.link import read_fatal
from engine.replicas.client import make_client
from engine.shared import SharedClient
from server.access.rate_limits import RateLimitStore
from server.adapter_table import AdapterTable
from server.app import create_app
from server.http import serve
from server.metrics import Metrics, MetricValues
from server.settings import Settings
from server.state import SharedState
from server.workers.messages import (
    EngineLost,
    GatheredMetrics,
    GatherRequest,
    Message,
    MessageReader,
    MetricsRequest,
    Setup,
    WorkerMetrics,
)

_READ_BYTES = 1 << 16
_GATHER_S = 5.0  # for the supervisor to send the metrics of all workers


def main(argv: list[str] | None = None) -> int:
    """Serve under the supervisor at the other end of the socket; returns the exit status."""
    parser = argparse.ArgumentParser(prog="server.workers.worker")
    parser.add_argument("fd", type=int, help="the worker's end of the socket pair")
    parser.add_argument("listen", type=int, help="the listening socket")
    parser.add_argument("--die-with-parent", action="store_true")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    for number in (signal.SIGHUP, signal.SIGUSR1):  # until their handlers are installed
        signal.signal(number, signal.SIG_IGN)
    if args.die_with_parent:
        die_with_parent()
    with socket.socket(fileno=args.fd) as supervisor, socket.socket(fileno=args.listen) as listener:
        supervisor.setblocking(True)
        messages = receive(supervisor, MessageReader())
        if not messages or not isinstance(messages[0], Setup):
            return 1
        return _serve(messages[0], supervisor, listener)


def _serve(setup: Setup, supervisor: socket.socket, listener: socket.socket) -> int:
    settings = Settings.from_json(setup.settings)
    writer = {"worker": setup.index}  # next to the usual fields
    logs.configure(settings.log_level, settings.log_format, writer)
    count = len(setup.engines)
    engines = [
        SharedClient(path, name_engine(number, count)) for number, path in enumerate(setup.engines)
    ]
    for index in setup.lost_engines:
        engines[index].give_up(EngineDead("the engine keeps dying"))
    engine = make_client(engines, prefix_caching=settings.enable_prefix_caching)
    directory = Path(setup.directory)
    shared = SharedState(
        rate_limits=RateLimitStore(directory / "rate_limits", setup.index, settings.api_workers),
        adapters=AdapterTable(directory / "adapters"),
    )
    app = create_app(settings, engine, shared)
    state = app.state.server
    control = _SupervisorConnection(engines, state.metrics)
    state.gather_metrics = control.gather
    listener.setblocking(False)
    # A duplicate: the event loop closes its own when it ends, which must not look like a crash.
    status = serve(app, settings, listener, background=control.run(supervisor.dup()))
    if state.failure is not None:
        with contextlib.suppress(OSError):  # the supervisor already knows, and has closed its end
            supervisor.sendall(encode(_fatal(state.failure)))
    return status


class _SupervisorConnection:
    """The worker's side of the socket pair. Belongs to the event loop."""

    def __init__(self, engines: Sequence[SharedClient], metrics: Metrics) -> None:
        self._engines = engines
        self._metrics = metrics
        self._writer: asyncio.StreamWriter | None = None
        self._pending_total: asyncio.Future[MetricValues] | None = None  # the pending sum

    async def run(self, supervisor: socket.socket) -> None:
        """Handle messages until the supervisor is gone; then exit: nothing can be resumed."""
        reader, self._writer = await asyncio.open_unix_connection(sock=supervisor)
        frames = MessageReader()
        while data := await reader.read(_READ_BYTES):
            for message in frames.feed(data):
                self._handle_message(message)
        os._exit(1)

    async def gather(self) -> MetricValues:
        """The metrics of all workers. Raises TimeoutError if the supervisor is stuck."""
        if self._pending_total is None:
            self._pending_total = asyncio.get_running_loop().create_future()
            self._send(GatherRequest())
        return await asyncio.wait_for(asyncio.shield(self._pending_total), _GATHER_S)

    def _handle_message(self, message: Message) -> None:
        if isinstance(message, MetricsRequest):
            self._send(WorkerMetrics(self._metrics.values))
        elif isinstance(message, GatheredMetrics):
            gathered, self._pending_total = self._pending_total, None
            if gathered is not None:
                gathered.set_result(message.values)
        elif isinstance(message, EngineLost):
            self._engines[message.engine].give_up(EngineDead(message.message))
        elif isinstance(message, Fatal):
            for engine in self._engines:
                engine.give_up(read_fatal(message))

    def _send(self, message: Message) -> None:
        assert self._writer is not None
        self._writer.write(encode(message))


def _fatal(error: EngineError) -> Fatal:
    return Fatal(str(error), type(error).__name__)


if __name__ == "__main__":
    sys.exit(main())

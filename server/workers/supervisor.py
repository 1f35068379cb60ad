"""The process that owns the engine and the API workers, and serves no requests itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from engine.child import Child
from engine.client import LoadProgress
from engine.config import EngineConfig
from engine.errors import EngineDead, EngineError
from engine.frames import Fatal
from engine.framing import encode
from engine.link import read_fatal
from engine.replicas.startup import replica_configs, start_all
from engine.scratch import ScratchDirectory
from engine.supervisor import CrashLimit, EngineSupervisor
from engine.types import EngineInfo
from server.metrics import MetricValues, merge
from server.settings import Settings
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

_log = logging.getLogger(__name__)
_READ_BYTES = 1 << 16
_METRICS_TIMEOUT_S = 1.0  # for a worker to send its metrics; after that its last ones count
_REAP_GRACE_S = 2.0  # for a worker that has closed its socket

Start = Callable[[LoadProgress | None], Awaitable[EngineInfo]]


class Supervisor:
    """One server with several API workers.

    Args:
        settings: of the server; ``api_workers`` is their number.
        sockets: listening, one per worker.
        announce: awaits the engine's start and reports its progress.
        child: see :class:`EngineSupervisor`.
    """

    def __init__(
        self,
        settings: Settings,
        sockets: Sequence[socket.socket],
        announce: Callable[[Start], Awaitable[EngineInfo]],
        child: Child | None = None,
    ) -> None:
        self._settings = settings
        self._sockets = sockets
        self._announce = announce
        self._directory = ScratchDirectory("workers")
        self._paths: list[str] = []  # of the sockets on which the engines accept workers
        self._listeners: list[socket.socket] = []
        configs = replica_configs(settings.engine_config(), settings.data_parallel_size)
        self._engines = [
            self._make_engine(index, config, None if index else child)
            for index, config in enumerate(configs)
        ]
        self._lost_engines: set[int] = set()  # numbers of engines
        self._workers: dict[int, _Worker] = {}  # by the index of their socket
        self._ended_values = MetricValues.zero(len(configs))  # of workers that have ended
        self._ending = False
        self.failure: EngineError | None = None  # why the server had to end

    def spawn(self) -> None:
        """Start the engines' processes; ``run`` awaits them."""
        for engine in self._engines:
            engine.spawn()

    async def run(self) -> int:
        """Serve until SIGTERM, SIGINT or a failure; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        # The workers reload files, or log their stacks.
        for number in (signal.SIGHUP, signal.SIGUSR1):
            loop.add_signal_handler(number, self._forward_signal, number)
        starting = asyncio.create_task(self._start_engines())
        try:
            await asyncio.gather(*map(self._supervise_worker, range(len(self._sockets))))
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await asyncio.gather(*(engine.close() for engine in self._engines))
            for listener in self._listeners:
                listener.close()
            self._directory.close()
        return 1 if self.failure is not None else 0

    # ------------------------------------------------------------ ends

    def _on_signal(self) -> None:
        """Forward the signal: the first one drains the workers, a second ends them."""
        self._ending = True
        for sock in self._sockets:  # a drained worker must not get further connections
            sock.close()
        for worker in self._workers.values():
            worker.child.process.terminate()

    def _forward_signal(self, number: signal.Signals) -> None:
        """Forward a signal to all workers."""
        for worker in self._workers.values():
            worker.child.process.send_signal(number)

    def _fail(self, error: EngineError) -> None:
        """Tell all workers that nothing can be served any more, and end."""
        if self.failure is None:
            self.failure = error
        self._ending = True
        for worker in self._workers.values():
            worker.send(Fatal(str(self.failure), type(self.failure).__name__))

    # ------------------------------------------------------------ engines

    def _make_engine(
        self, index: int, config: EngineConfig, child: Child | None
    ) -> EngineSupervisor:
        """An engine that accepts the workers on a socket of its own."""
        path = str(self._directory.path / f"engine-{index}")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        self._paths.append(path)
        self._listeners.append(listener)
        on_death = partial(self._on_engine_lost, index)
        return EngineSupervisor(config, child=child, listener=listener, on_death=on_death)

    async def _start_engines(self) -> None:
        try:
            await self._announce(partial(start_all, [engine.start for engine in self._engines]))
        except EngineError as error:
            self._fail(error)

    def _on_engine_lost(self, index: int, error: EngineError) -> None:
        """Record that an engine is gone for good; any others continue to serve."""
        self._lost_engines.add(index)
        if len(self._lost_engines) == len(self._engines):
            self._fail(error)
            return
        _log.error("engine %d is given up, and the others serve on: %s", index, error)
        for worker in self._workers.values():
            worker.send(EngineLost(index, str(error)))

    # ------------------------------------------------------------ workers

    async def _supervise_worker(self, index: int) -> None:
        """Keep a worker running on socket ``index`` until shutdown."""
        settings, paths = self._settings.model_dump_json(), tuple(self._paths)
        crashes = CrashLimit()
        while not self._ending:
            given_up = tuple(sorted(self._lost_engines))
            setup = Setup(settings, paths, given_up, str(self._directory.path), index)
            worker = self._workers[index] = _Worker(self._sockets[index], setup)
            await worker.listen(self._handle_message)
            code = await asyncio.to_thread(worker.child.end, _REAP_GRACE_S)
            values = self._workers.pop(index).values
            values.fail_live("worker_died")
            self._ended_values = merge([self._ended_values, values])
            if self._ending:
                return
            _log.error("API worker %d ended with code %s", worker.child.pid, code)
            if code and crashes.record_crash():
                self._fail(EngineDead("the API workers keep dying"))

    def _handle_message(self, worker: _Worker, message: Message) -> None:
        if isinstance(message, WorkerMetrics):
            worker.set_metrics(message.values)
        elif isinstance(message, GatherRequest):
            worker.gather_task = asyncio.create_task(self._gather(worker))
        elif isinstance(message, Fatal):
            self._fail(read_fatal(message))

    async def _gather(self, asker: _Worker) -> None:
        """Sum the metrics of all workers for one that is being scraped."""
        answers = [worker.request_metrics() for worker in self._workers.values()]
        await asyncio.wait(answers, timeout=_METRICS_TIMEOUT_S)
        total = merge([self._ended_values, *(worker.values for worker in self._workers.values())])
        for numbers, engine in zip(total.engines, self._engines, strict=True):
            numbers.num_restarts = engine.num_restarts
        asker.send(GatheredMetrics(total))


class _Worker:
    """One API worker's process, and its last known metrics."""

    def __init__(self, listener: socket.socket, setup: Setup) -> None:
        self.child = Child(
            "server.workers.worker", str(listener.fileno()), pass_fds=[listener.fileno()]
        )
        with contextlib.suppress(BrokenPipeError):  # it is already dead: end-of-file will show it
            self.child.socket.sendall(encode(setup))
        self.values = MetricValues.zero()
        self.gather_task: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._pending_metrics: asyncio.Future[None] | None = None

    async def listen(self, on_message: Callable[[_Worker, Message], None]) -> None:
        """Pass its messages to ``on_message`` until it ends."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self.child.socket)
        frames = MessageReader()
        with contextlib.suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                for message in frames.feed(data):
                    on_message(self, message)
        self.set_metrics(self.values)
        self._writer.close()

    def send(self, message: Message) -> None:
        """Send a message, if the worker is alive."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(message))

    def request_metrics(self) -> asyncio.Future[None]:
        """Request its metrics; done when they have arrived, or the worker has ended."""
        if self._pending_metrics is None or self._pending_metrics.done():
            self._pending_metrics = asyncio.get_running_loop().create_future()
            self.send(MetricsRequest())
        return self._pending_metrics

    def set_metrics(self, numbers: MetricValues) -> None:
        """Store the metrics that have arrived."""
        self.values = numbers
        if self._pending_metrics is not None and not self._pending_metrics.done():
            self._pending_metrics.set_result(None)

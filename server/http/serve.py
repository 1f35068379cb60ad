"""Running the application on a listening socket until shutdown.

SIGTERM ──► /ready is 503, new work gets 503 ──► requests in flight finish ──► close, exit 0
                 (the socket still listens)         (at most shutdown_timeout_s)
second SIGTERM ──► exit now
SIGHUP ──► reload the key file and the certificate
SIGUSR1 ──► log what every task waits for (``stacks.py``)
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, Literal

import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.types import ASGIApp

from engine.gc_tuning import tune_for_serving
from server.http import descriptors
from server.http.protocol import HardenedProtocol
from server.http.stacks import log_stacks_on_signal
from server.http.tls import Tls
from server.settings import Settings
from server.state import ServerState

_log = logging.getLogger(__name__)
_POLL_S = 0.05
_CLOSE_S = 1  # for connections to close once their requests are done


def serve(
    app: FastAPI,
    settings: Settings,
    sock: socket.socket,
    *,
    background: Coroutine[Any, Any, None] | None = None,
) -> int:
    """Serve ``app`` on ``sock`` until SIGTERM, SIGINT or the engine's end.

    Args:
        app: made by ``create_app``.
        settings: those that ``app`` was made with.
        sock: listening, non-blocking.
        background: runs on the same event loop, and is cancelled at the end.

    Returns the process's exit status: 0 after a signal, 1 if the engine is gone for good.
    """
    state: ServerState = app.state.server
    descriptors.raise_limit()

    config, tls = uvicorn_config(app, settings, lifespan="on")

    def reload() -> None:
        state.access.keys.reload()
        if tls is not None:
            tls.reload()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(_Server(config, state), sock, background, reload))
    return 1 if state.failure is not None else 0


def uvicorn_config(
    app: ASGIApp, settings: Settings, *, lifespan: Literal["on", "off"]
) -> tuple[uvicorn.Config, Tls | None]:
    """How uvicorn serves ``app`` with the settings' timeouts and certificate, which it returns too.

    Raises:
        InvalidSettings: the certificate cannot be used.
    """

    class Protocol(HardenedProtocol):
        header_timeout_s = settings.header_timeout_s
        write_timeout_s = settings.body_timeout_s
        max_connections = descriptors.max_connections()

    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan=lifespan,
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # read where they matter, from proxies that are trusted
        timeout_keep_alive=75,  # longer than the usual clients keep pooled connections
        timeout_graceful_shutdown=_CLOSE_S,
    )
    config.load()
    tls = Tls.of(settings)
    config.ssl = None if tls is None else tls.context
    return config, tls


async def _run(
    server: _Server,
    sock: socket.socket,
    background: Coroutine[Any, Any, None] | None,
    reload: Callable[[], None],
) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload)
    log_stacks_on_signal(loop)
    tasks = [asyncio.create_task(_freeze_gc_when_loaded(server.state))]
    if background is not None:
        tasks.append(asyncio.create_task(background))
    await server.serve(sockets=[sock])
    for task in tasks:
        task.cancel()


async def _freeze_gc_when_loaded(state: ServerState) -> None:
    await state.wait_until_loaded()
    tune_for_serving()


class _Server(uvicorn.Server):
    """uvicorn's server, which drains between the signal and the closing of the socket."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self.state = state

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Record the signal. uvicorn's own handler would raise it again at exit; we exit with 0."""
        if self.state.draining:
            self.force_exit = True
        self.state.draining = True
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop; called ten times a second."""
        return await super().on_tick(counter) or self.state.failure is not None

    async def main_loop(self) -> None:
        """Serve, then let requests in flight finish."""
        await super().main_loop()
        state = self.state
        in_flight = state.requests_in_flight
        if in_flight and state.failure is None:
            _log.info("shutting down; waiting for %d requests in flight", in_flight)
        state.draining = True
        deadline = asyncio.get_running_loop().time() + state.settings.shutdown_timeout_s
        while state.requests_in_flight and not self.force_exit:
            if asyncio.get_running_loop().time() > deadline:
                _log.warning("%d requests did not finish in time", state.requests_in_flight)
                break
            await asyncio.sleep(_POLL_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections and the application, after a second signal too.

        uvicorn would leave them to the loop's end then, which logs the application's cancellation.
        """
        await super().shutdown(sockets)
        if self.force_exit:
            left = list(self.server_state.tasks)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await self.lifespan.shutdown()

"""``quire serve``: from a command line to a server that answers.

    parse ─► bind the port ─► find the model ─► spawn the engine process ─► import the API ─► serve
                 │                  │                    └── loads the weights meanwhile ──┐
             port busy: 1      no such model: 1                          cannot load: 1 ◄──┘

The order is what makes the start quick: a busy port is told before anything heavy, and the
engine process imports its tensor library while this one imports its web framework.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence

from engine import logs
from engine.client import LoadProgress
from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.process import SubprocessClient
from engine.types import EngineInfo
from server.cli.flags import parse_settings
from server.cli.progress import LoadDisplay, display_url, ready_message
from server.model_source import resolve_model
from server.settings import InvalidSettings, Settings

_BACKLOG = 2048  # connections the kernel holds for us until they are accepted


def main(argv: Sequence[str]) -> int:
    """Serve until told to stop. Returns the exit status."""
    started_s = time.monotonic()
    try:
        settings = parse_settings(argv)
        with bind(settings.host, settings.port) as sock:
            return _serve(_with_model_directory(settings), sock, started_s)
    except (InvalidSettings, ModelLoadError, BindError) as error:
        print(f"quire serve: {error}", file=sys.stderr)
        return 1


def _serve(settings: Settings, sock: socket.socket, started_s: float) -> int:
    logs.configure(settings.log_level, settings.log_format)
    engine = AnnouncedEngine(settings.engine_config(), settings, sock, started_s)
    engine.spawn()

    from server.app import create_app  # after the spawn: the two processes import side by side
    from server.http import serve

    app = create_app(settings, engine)
    status = serve(app, settings, sock)
    failure = app.state.server.failure
    if failure is not None:
        print(f"quire serve: {' '.join(str(failure).split())}", file=sys.stderr)
    return status


class BindError(Exception):
    """The address cannot be listened on; one line for a person."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, so that a port in use is known before anything is loaded.

    Raises:
        BindError: the address is in use, or none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise BindError(f"cannot listen on {host}: {error.strerror}") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        reason = (error.strerror or str(error)).lower()
        raise BindError(f"cannot listen on {host}:{port}: {reason}") from None
    sock.setblocking(False)
    return sock


class AnnouncedEngine(SubprocessClient):
    """The engine process, with its loading shown and its readiness told on standard error."""

    def __init__(
        self, config: EngineConfig, settings: Settings, sock: socket.socket, started_s: float
    ) -> None:
        super().__init__(config)
        self._settings = settings
        self._port = sock.getsockname()[1]
        self._started_s = started_s

    async def start(self, on_progress: LoadProgress | None = None) -> EngineInfo:
        """Load the model, telling how it goes. Raises ModelLoadError or EngineDead."""
        display = LoadDisplay()

        def show(fraction: float, what: str) -> None:
            display(fraction, what)
            if on_progress is not None:
                on_progress(fraction, what)

        try:
            info = await super().start(show)
        finally:
            display.clear()
        settings = self._settings
        display.line(
            ready_message(
                info,
                url=display_url(settings.host, self._port),
                model=settings.model_names[0],
                needs_key=bool(settings.api_keys),
                took_s=time.monotonic() - self._started_s,
            )
        )
        return info


def _with_model_directory(settings: Settings) -> Settings:
    """``settings`` with the model's directory in place of its name, its public name kept."""
    if settings.model is None:
        return settings
    directory = resolve_model(settings.model)
    return settings.model_copy(
        update={"model": directory, "served_model_names": settings.model_names}
    )

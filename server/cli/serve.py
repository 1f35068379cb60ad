"""``quire serve``: from a command line to a running server.

    parse ─► bind the port ─► find the model ─► tell the engine process ─► import the API ─► serve
                 │                  │                   └── loads the weights meanwhile ──┐
             port busy: 1      no such model: 1                         cannot load: 1 ◄──┘

The order makes startup fast. A busy port is reported before anything heavy is imported, and the
engine process, which was started first of all (``server/cli/prestart.py``), imports torch while
this one imports its web framework.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine import logs
from engine.child import Child
from engine.client import LoadProgress
from engine.config import EngineConfig, LogFormat
from engine.errors import ModelLoadError
from engine.gguf.file import find_gguf, is_gguf
from engine.model_source import (
    DownloadProgress,
    is_hub_name,
    resolve_adapter,
    resolve_model,
    resolve_tokenizer,
)
from engine.process import SubprocessClient
from engine.profiler import make_profile_directory
from engine.replicas.client import ReplicaClient
from engine.replicas.startup import replica_configs
from engine.types import EngineInfo
from server.chat_template import read_chat_template
from server.cli.download import Download
from server.cli.flags import parse_settings
from server.cli.progress import LoadDisplay, display_url, log_ready, ready_message
from server.setting_sources import misspelt_variables
from server.settings import InvalidSettings, Settings, settings_table

if TYPE_CHECKING:
    from server.state import ServerState

logger = logging.getLogger(__name__)

_BACKLOG = 2048  # connections that the kernel queues until they are accepted


def main(argv: Sequence[str], child: Child | None = None) -> int:
    """Serve until shutdown. Returns the exit status.

    Args:
        argv: the arguments after ``quire serve``.
        child: see :class:`engine.supervisor.EngineSupervisor`.
    """
    started_s = time.monotonic()
    form: LogFormat = "text"
    try:
        settings = parse_settings(argv)
        form = settings.log_format
        logs.configure(settings.log_level, form)
        if settings.nnodes > 1 or settings.node_rank:
            from server.cli.node import check_nodes

            check_nodes(settings)
        if settings.node_rank:
            return _serve_ranks(settings, child)
        sockets = bind(settings.host, settings.port, settings.api_workers)
        with contextlib.ExitStack() as stack:
            for sock in sockets:
                stack.enter_context(sock)
            _check_optional_features(settings)
            read_chat_template(settings.chat_template)
            _check_tokenizer(settings)
            _check_adapters(settings)
            _check_weights_directory(settings)
            _make_profile_directory(settings)
            _check_data_directory(settings)
            with Download(settings, sockets) as download:
                settings = with_model_directories(settings, download.report)
            for line in misspelt_variables(settings_table(), os.environ):
                logger.warning("%s", line)
            announcer = Announcer(settings, sockets[0], started_s)
            if settings.api_workers > 1:
                return _serve_workers(settings, sockets, announcer, child)
            return _serve(settings, sockets[0], announcer, child)
    except (InvalidSettings, ModelLoadError, BindError) as error:
        _report_failure(error, form)
        return 1


def _serve_ranks(settings: Settings, child: Child | None) -> int:
    """Serve ranks for an engine on another machine."""
    from server.cli.node import serve_ranks

    if child is not None:
        child.kill()  # this machine runs no engine
    serve_ranks(with_model_directories(settings))
    return 0


def _serve(
    settings: Settings, sock: socket.socket, announcer: Announcer, child: Child | None
) -> int:
    """Serve from this process."""
    configs = replica_configs(settings.engine_config(), settings.data_parallel_size)
    engine: AnnouncedEngine | AnnouncedReplicas
    if len(configs) == 1:
        engine = AnnouncedEngine(configs[0], announcer, child)
    else:
        clients = [SubprocessClient(configs[0], child=child), *map(SubprocessClient, configs[1:])]
        engine = AnnouncedReplicas(
            clients, announcer, prefix_caching=settings.enable_prefix_caching
        )
    engine.spawn()

    from server.app import create_app  # after the spawn: both processes import in parallel
    from server.http import serve

    app = create_app(settings, engine)
    state = app.state.server
    status = serve(app, settings, sock, background=_announce_when_loaded(state, announcer))
    if state.failure is not None:
        _report_failure(state.failure, settings.log_format)
    return status


async def _announce_when_loaded(state: ServerState, announcer: Announcer) -> None:
    """Report readiness once the tokenizer, which this process reads, has been loaded too."""
    await state.wait_until_loaded()
    if state.is_loaded:
        announcer.report_ready(state.engine.info)


def _serve_workers(
    settings: Settings,
    sockets: Sequence[socket.socket],
    announcer: Announcer,
    child: Child | None,
) -> int:
    """Serve from worker processes; this process only supervises them."""
    from server.workers.supervisor import Supervisor

    supervisor = Supervisor(settings, sockets, announcer.announce, child)
    supervisor.spawn()
    status = asyncio.run(supervisor.run())
    if supervisor.failure is not None:
        _report_failure(supervisor.failure, settings.log_format)
    return status


def _report_failure(failure: Exception, form: LogFormat) -> None:
    """Say in one line why the server ends."""
    reason = " ".join(str(failure).split())
    if form == "json":
        logger.critical("%s", reason)
    else:
        print(f"quire serve: {reason}", file=sys.stderr)


class BindError(Exception):
    """The server cannot listen on the address; one line for the user."""


def bind(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """Open listening sockets on one address, to detect a busy port before anything is loaded.

    Several sockets share the port: the kernel distributes connections among them.

    Raises:
        BindError: the address is in use, or not one of this machine's.
    """
    first = _bind(host, port, shared=False, listens=count == 1)
    if count == 1:
        return [first]
    if not hasattr(socket, "SO_REUSEPORT"):
        raise BindError("several API workers need SO_REUSEPORT, which this system does not have")
    # The first socket only tests whether the port is free: one that shares it could join another
    # server's port. It never listened, so no client can have connected to it.
    port = first.getsockname()[1]
    first.close()
    return [_bind(host, port, shared=True) for _ in range(count)]


def _bind(host: str, port: int, *, shared: bool, listens: bool = True) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise BindError(f"cannot listen on {host}: {error.strerror}") from None
    # Of a name with addresses of both kinds, such as localhost, IPv4's: clients that are given the
    # name try it too, and those that are given 127.0.0.1 try nothing else.
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        if listens:
            sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        reason = (error.strerror or str(error)).lower()
        if error.errno == errno.EADDRINUSE:
            reason += "; --port names another, and 0 any free one"
        raise BindError(f"cannot listen on {host}:{port}: {reason}") from None
    sock.setblocking(False)
    return sock


class Announcer:
    """Reports on standard error how the engine loads, and when it is ready."""

    def __init__(self, settings: Settings, sock: socket.socket, started_s: float) -> None:
        self._settings = settings
        self._port = sock.getsockname()[1]
        self._started_s = started_s

    async def announce(self, start: Callable[[LoadProgress], Awaitable[EngineInfo]]) -> EngineInfo:
        """Await ``start``, and report its progress and readiness. Raises what it raises."""
        info = await self.report_loading(start)
        self.report_ready(info)
        return info

    async def report_loading(
        self,
        start: Callable[[LoadProgress], Awaitable[EngineInfo]],
        on_progress: LoadProgress | None = None,
    ) -> EngineInfo:
        """Await ``start`` and report its progress. Raises what it raises."""
        display = LoadDisplay(self._settings.log_format)

        def show(fraction: float, what: str) -> None:
            display(fraction, what)
            if on_progress is not None:
                on_progress(fraction, what)

        try:
            return await start(show)
        finally:
            display.clear()

    def report_ready(self, info: EngineInfo) -> None:
        """Report that requests are served, and where."""
        settings = self._settings
        url = display_url(settings.host, self._port, tls=settings.ssl_certfile is not None)
        model, has_dashboard = settings.model_names[0], settings.is_dashboard_enabled
        took_s = time.monotonic() - self._started_s
        if settings.log_format == "json":
            log_ready(info, url=url, model=model, has_dashboard=has_dashboard, took_s=took_s)
            return
        message = ready_message(
            info,
            url=url,
            model=model,
            needs_key=bool(settings.api_keys or settings.api_key_file),
            has_dashboard=has_dashboard,
            took_s=took_s,
        )
        LoadDisplay().line(message)


class AnnouncedEngine(SubprocessClient):
    """The engine process, with its progress reported on standard error."""

    def __init__(
        self, config: EngineConfig, announcer: Announcer, child: Child | None = None
    ) -> None:
        super().__init__(config, child=child)
        self._announcer = announcer

    async def start(self, on_progress: LoadProgress | None = None) -> EngineInfo:
        """Load the model and report its progress. Raises ModelLoadError or EngineDead."""
        return await self._announcer.report_loading(super().start, on_progress)


class AnnouncedReplicas(ReplicaClient):
    """The same for several engine processes."""

    def __init__(
        self, clients: Sequence[SubprocessClient], announcer: Announcer, *, prefix_caching: bool
    ) -> None:
        super().__init__(clients, prefix_caching=prefix_caching)
        self._announcer = announcer

    async def start(self, on_progress: LoadProgress | None = None) -> EngineInfo:
        """Load the model and report its progress. Raises ModelLoadError or EngineDead."""
        return await self._announcer.report_loading(super().start, on_progress)


def _check_optional_features(settings: Settings) -> None:
    """Check keys, certificates and tracing before anything heavy is imported.

    Raises InvalidSettings.
    """
    # Imported only if used, since most servers start without them.
    if settings.api_key_file is not None:
        from server.access.key_file import read_key_file

        read_key_file(settings.api_key_file)
    if settings.ssl_certfile or settings.ssl_keyfile or settings.ssl_ca_certs:
        from server.http.tls import Tls

        Tls.of(settings)
    if settings.otlp_traces_endpoint is not None:
        from server.tracing import check_tracing

        check_tracing(settings)


def _check_tokenizer(settings: Settings) -> None:
    """See that there is one; it is read when the weights are loaded, which may take minutes."""
    given = settings.tokenizer
    if given is None or Path(given).is_dir() or is_gguf(given):
        return
    if Path(given).exists() or not is_hub_name(given):
        raise InvalidSettings(f"--tokenizer: {given} is neither a directory nor a GGUF file")


def _check_adapters(settings: Settings) -> None:
    """See that adapters are where they are said to be; the engine reads them once it has loaded."""
    if settings.lora_dir is not None and not settings.lora_dir.is_dir():
        raise InvalidSettings(f"--lora-dir: {settings.lora_dir} is not a directory")
    for name, path in settings.adapters.items():
        is_there = Path(path, "adapter_config.json").is_file()
        if not is_there and (Path(path).exists() or not is_hub_name(path)):
            raise InvalidSettings(f"--lora {name}: there is no adapter_config.json in {path}")


def _check_weights_directory(settings: Settings) -> None:
    """Check the directory of weights that requests may name; loading from it must run no code."""
    if settings.weights_dir is None:
        return
    if not settings.enable_sleep_mode:
        raise InvalidSettings("--weights-dir needs --enable-sleep-mode")
    if settings.load_format == "bin":
        raise InvalidSettings(
            "--weights-dir cannot be used with --load-format bin: pickles are read from the model "
            "that the server is started with, and from nowhere else"
        )
    if not settings.weights_dir.is_dir():
        raise InvalidSettings(f"--weights-dir: {settings.weights_dir} is not a directory")


def _make_profile_directory(settings: Settings) -> None:
    if settings.profile is None:
        return
    try:
        make_profile_directory(settings.profile)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidSettings(f"--profile: cannot write to {settings.profile}: {reason}") from None


def _check_data_directory(settings: Settings) -> None:
    """See that a data directory that was asked for keeps what is stored; it is made if need be."""
    if settings.data_dir is None:
        return
    from server.store.database import Database

    fault = Database(settings.data_dir).fault()
    if fault is not None:
        raise InvalidSettings(f"--data-dir: cannot store in {settings.data_dir}: {fault}")


def with_model_directories(
    settings: Settings, on_progress: DownloadProgress | None = None
) -> Settings:
    """``settings`` with directories in place of the names of models, a tokenizer and adapters.

    The model's public names are kept. One of the Hub is also served under its name there, by which
    clients of others know it.

    Args:
        settings: name them.
        on_progress: see ``resolve_model``.

    Raises ModelLoadError: there is no such model, tokenizer or adapter.
    """
    found: dict[str, object] = {}
    if settings.tokenizer is not None:  # what is small comes first: a wrong name is told early
        with _named("--tokenizer"):
            found["tokenizer"] = resolve_tokenizer(settings.tokenizer, on_progress)
    adapters: list[str] = []
    for name, path in settings.adapters.items():
        with _named(f"--lora {name}"):
            adapters.append(f"{name}={resolve_adapter(path, on_progress)}")
    found["loras"] = adapters
    if settings.model is not None:
        directory = resolve_model(settings.model, settings.load_format, on_progress)
        if find_gguf(directory) is None and not Path(directory, "config.json").is_file():
            raise ModelLoadError(f"{directory} holds no config.json and no GGUF file, so no model")
        names = settings.model_names
        if directory != settings.model and not settings.served_model_names:
            names.append(settings.model.partition("@")[0])
        found |= {"model": directory, "served_model_names": names}
    if settings.draft_model is not None:
        found["draft_model"] = resolve_model(
            settings.draft_model, settings.load_format, on_progress
        )
    return settings.model_copy(update=found)


@contextlib.contextmanager
def _named(flag: str) -> Iterator[None]:
    """Name the flag in a ModelLoadError of the block."""
    try:
        yield
    except ModelLoadError as error:
        raise ModelLoadError(f"{flag}: {error}") from None

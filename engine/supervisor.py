"""Keeps an engine process running: starts it, and replaces it when it dies.

Death is detected by end-of-file. An engine that dies repeatedly is given up, as is one whose model
cannot be loaded at the first start. Nothing here imports the tensor library.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import get_args

import msgspec

from engine.child import Child, describe_exit
from engine.client import LoadProgress
from engine.config import Device, EngineConfig
from engine.errors import EngineDead, EngineError
from engine.frames import Begun, Configure, Output, Ready, Shutdown, encode
from engine.link import EngineLink
from engine.types import EngineInfo

logger = logging.getLogger(__name__)

MAX_CRASHES = 3  # within CRASH_WINDOW_S; then there is no further restart
CRASH_WINDOW_S = 60.0
SPAWN_PAUSE_S = 5.0  # after the system refused a process, for instance for want of memory
_EXIT_GRACE_S = 5.0  # from Shutdown to SIGTERM, and from there to SIGKILL
_REAP_GRACE_S = 2.0  # for a process that has closed its socket to exit


class CrashLimit:
    """Counts crashes within a time window."""

    def __init__(self) -> None:
        self._crashes_s: list[float] = []

    def record_crash(self) -> bool:
        """Count a crash; true if there have been too many."""
        now_s = time.monotonic()
        self._crashes_s = [at for at in self._crashes_s if now_s - at < CRASH_WINDOW_S]
        self._crashes_s.append(now_s)
        return len(self._crashes_s) >= MAX_CRASHES


class EngineSupervisor:
    """Runs one engine process at a time.

    Args:
        config: what to load; sent to the child process.
        runner: ``module:factory`` of the runner, if not the engine's own.
        child: an ``engine.worker`` process that waits for its configuration, to use first.
        listener: a listening Unix socket on which the engine accepts further clients. It stays open
            here, so clients that connect between two engines wait for the second.
        on_output: see :class:`~engine.link.EngineLink`; unused with a ``listener``.
        on_change: called when the loaded model or the engine's activity changes.
        on_restart: called with the link to an engine that replaces a dead one.
        on_death: called with the reason when an engine that had been ready is given up.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        runner: str | None = None,
        child: Child | None = None,
        listener: socket.socket | None = None,
        on_output: Callable[[Output | Begun], None] = lambda output: None,
        on_change: Callable[[Ready], None] = lambda ready: None,
        on_restart: Callable[[EngineLink], None] = lambda link: None,
        on_death: Callable[[EngineError], None] = lambda error: None,
    ) -> None:
        self._config = config
        self._runner = runner
        self._listener = listener
        self._on_output = on_output
        self._on_change = on_change
        self._on_restart = on_restart
        self._on_death = on_death
        self._spare = child  # not configured yet
        self._child: Child | None = None
        # To the current child, also while it loads.
        self._current_link: EngineLink | None = None
        self._task: asyncio.Task[None] | None = None
        self._crashes = CrashLimit()
        self.link: EngineLink | None = None  # the same link, once requests may be sent
        self.num_restarts = 0  # engines started to replace one that died

    @property
    def pid(self) -> int | None:
        """The engine's process id, or None if there is no process."""
        return None if self._child is None else self._child.pid

    def spawn(self) -> None:
        """Start the child process now, so that it loads in the background; ``start`` awaits it.

        Needs no event loop, and returns as soon as the process exists. Idempotent.
        """
        if self._child is not None:
            return
        self._child, self._spare = self._spare or Child("engine.worker"), None
        listeners = [] if self._listener is None else [self._listener.fileno()]
        frame = encode(Configure(self._config, self._runner, bool(listeners)))
        with contextlib.suppress(BrokenPipeError):  # already dead; the end-of-file will show it
            sent = socket.send_fds(self._child.socket, [frame], listeners)
            self._child.socket.sendall(frame[sent:])

    async def start(self, on_progress: LoadProgress | None = None) -> EngineInfo:
        """Load the model. Raises ModelLoadError or EngineDead."""
        self.link, info = await self._connect(on_progress)
        self._task = asyncio.create_task(self._supervise(self.link))
        return info

    async def close(self) -> None:
        """Shut the engine down after its step, or by force after a grace period. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if self.link is not None:
            self.link.send(Shutdown())
            self.link.flush()
        elif self._current_link is not None:
            self._current_link.close()  # still loading: end-of-file ends it
        elif self._child is not None:
            self._child.socket.close()
        self.link = None
        child, self._child = self._child, None
        if child is not None:
            await asyncio.to_thread(child.end, _EXIT_GRACE_S)
        if self._current_link is not None:
            self._current_link.close()

    # ------------------------------------------------------------ helpers

    async def _connect(self, on_progress: LoadProgress | None) -> tuple[EngineLink, EngineInfo]:
        """Connect to the child and await its loading. Raises ModelLoadError or EngineDead."""
        self.spawn()
        assert self._child is not None
        self._current_link = link = EngineLink(
            self._on_output, on_progress, self._handle_ready, self._config.engine_name
        )
        loop = asyncio.get_running_loop()
        child = self._child
        await loop.create_unix_connection(lambda: link, sock=child.socket)
        try:
            return link, await link.ready
        except EngineDead as error:
            if link.has_reason or self._child is not child:  # or it was closed meanwhile
                raise
            code = await asyncio.to_thread(child.end, _REAP_GRACE_S)
            raise EngineDead(f"{error}: {describe_exit(code)}") from None

    def _handle_ready(self, ready: Ready) -> None:
        """Remember what an engine that replaces this one has to be like: its weights, and its kind
        of device. A model must not move to the CPU because its GPU has just been lost."""
        info = ready.info
        if info.generation != self._config.generation:
            self._config = msgspec.structs.replace(
                self._config, model=info.model, generation=info.generation
            )
        kind = info.device.partition(":")[0]
        if self._config.device == "auto" and kind in get_args(Device):  # a stub has none
            self._config = msgspec.structs.replace(self._config, device=kind)
        self._on_change(ready)

    async def _supervise(self, link: EngineLink) -> None:
        """Replace each engine that dies, until the crash limit is reached."""
        try:
            while True:
                await link.lost
                self.link = None
                link = await self._replace()
                self.num_restarts += 1
                self.link = link
                self._on_restart(link)
        except EngineError as error:
            self._on_death(error)
        except Exception as error:
            logger.exception("the supervisor of %s failed", self._config.engine_name)
            self._on_death(EngineDead(f"{type(error).__name__}: {error}"))

    async def _replace(self) -> EngineLink:
        """Start an engine in place of a dead one. Raises EngineDead after too many crashes."""
        while True:
            await self._reap()
            if self._crashes.record_crash():
                raise EngineDead("the engine keeps dying")
            logger.warning("restarting %s; its requests will continue", self._config.engine_name)
            try:
                link, _ = await self._connect(None)
            except EngineError as error:
                logger.error("%s could not be restarted: %s", self._config.engine_name, error)
            except OSError as error:
                logger.error("no process for %s: %s", self._config.engine_name, error)
                await asyncio.sleep(SPAWN_PAUSE_S)
            else:
                return link

    async def _reap(self) -> None:
        """Reap the dead process. Its memory must be free before another engine loads."""
        child, self._child = self._child, None
        if child is not None:
            code = await asyncio.to_thread(child.end, _REAP_GRACE_S)
            name = self._config.engine_name
            logger.error("the process %d of %s ended: %s", child.pid, name, describe_exit(code))

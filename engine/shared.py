"""A client of an engine process that another process starts and restarts.

    API worker ── SharedClient ──┐ Submit, Abort
    API worker ── SharedClient ──┼──────────────► listening Unix socket ─ ClientHub ─ EngineLoop
    API worker ── SharedClient ──┘ ◄── Ready, Output                     (engine/hub.py)

End-of-file means that the engine has died, and the client connects again. The engine's supervisor
(``engine/supervisor.py``) keeps the socket open, so the connection waits there until another engine
has loaded. Only the supervisor knows whether there will be one. When it has given up, the client is
told so by ``give_up``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.client import EngineClient, LoadProgress
from engine.errors import EngineDead, EngineError
from engine.link import EngineLink
from engine.remote import RemoteClient
from engine.types import EngineInfo

_RECONNECT_DELAY_S = 0.05  # after a failed connection attempt


class SharedClient(RemoteClient):
    """A :class:`engine.client.EngineClient` that shares its engine with others.

    Args:
        path: the Unix socket on which the engine accepts clients.
        name: the engine's name, for messages.
    """

    def __init__(self, path: str, name: str = "the engine") -> None:
        super().__init__(name)
        self._path = path
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[EngineInfo] | None = None

    @property
    def members(self) -> Sequence[EngineClient]:
        """Itself."""
        return (self,)

    async def start(self, on_progress: LoadProgress | None = None) -> EngineInfo:
        """Wait until the engine has loaded. Raises the error passed to ``give_up``."""
        if self._dead:
            raise self._error
        self._started = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep_connected(self._started))
        return await self._started

    def give_up(self, error: EngineError) -> None:
        """Note that the engine is dead and will not be restarted."""
        self._give_up(error)
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)

    async def close(self) -> None:
        """Disconnect; the engine ends this client's requests. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        link = self._link
        self._end(EngineDead("the engine was closed"))
        if link is not None:
            link.close()

    async def _keep_connected(self, started: asyncio.Future[EngineInfo]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            link = EngineLink(self._handle_output, on_change=self._handle_ready, name=self._name)
            try:
                await loop.create_unix_connection(lambda link=link: link, self._path)
                self._info = await link.ready
            except (OSError, EngineError):  # it died while loading, or the backlog was full
                await asyncio.sleep(_RECONNECT_DELAY_S)
                continue
            except asyncio.CancelledError:
                link.close()
                raise
            self._attach(link)
            if not started.done():
                started.set_result(self._info)
            await link.lost

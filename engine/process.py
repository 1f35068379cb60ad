"""An engine in a process of its own, started and restarted by its only client.

    API process                                   engine process (engine/worker.py)
    SubprocessClient ── Configure, Submit, Abort, Shutdown ──►  EngineLoop ─ EngineCore
           ▲             Ping and all ControlRequests                │
           │                   one socket pair                       │
           │          Loading, Ready, Begun, Output, Pong,           │
           └────────────────── ControlReply, Fatal ◄─────────────────┘

Each side learns of the other's death by end-of-file. For several API processes that share an
engine, see ``engine/shared.py``. Nothing here imports the tensor library.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.child import Child
from engine.client import EngineClient, LoadProgress
from engine.config import EngineConfig
from engine.errors import EngineDead, EngineError
from engine.remote import RemoteClient
from engine.supervisor import EngineSupervisor
from engine.types import EngineInfo


class SubprocessClient(RemoteClient):
    """A :class:`engine.client.EngineClient` whose engine runs in a child process.

    Args:
        config: what to load; sent to the child.
        runner: ``module:factory`` of the runner, if it is not the engine's own.
        child: see :class:`EngineSupervisor`.
    """

    def __init__(
        self, config: EngineConfig, *, runner: str | None = None, child: Child | None = None
    ) -> None:
        super().__init__(config.engine_name)
        self._supervisor = EngineSupervisor(
            config,
            runner=runner,
            child=child,
            on_output=self._handle_output,
            on_change=self._handle_ready,
            on_restart=self._attach,
            on_death=self._give_up,
        )

    @property
    def members(self) -> Sequence[EngineClient]:
        """Itself."""
        return (self,)

    @property
    def pid(self) -> int | None:
        """The engine's process id, or None if there is no process."""
        return self._supervisor.pid

    @property
    def num_restarts(self) -> int:
        """How many engines were started to replace one that died."""
        return self._supervisor.num_restarts

    def spawn(self) -> None:
        """Start the child process now, so that it loads in the background; ``start`` awaits it.

        Needs no event loop, and returns as soon as the process exists. Idempotent.
        """
        self._supervisor.spawn()

    async def start(self, on_progress: LoadProgress | None = None) -> EngineInfo:
        """Load the model. Raises ModelLoadError or EngineDead."""
        try:
            self._info = await self._supervisor.start(on_progress)
        except EngineError as error:
            self._give_up(error)
            raise
        assert self._supervisor.link is not None
        self._attach(self._supervisor.link)
        return self._info

    async def close(self) -> None:
        """Shut the engine down after its step, or by force after a grace period. Idempotent."""
        self._end(EngineDead("the engine was closed"))
        await self._supervisor.close()

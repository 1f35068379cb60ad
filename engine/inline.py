"""An engine in this process, for asyncio users; its loop runs in a thread of its own.

For synchronous use drive :class:`engine.core.EngineCore` directly.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from engine.client import EngineClient, LoadProgress, RequestStream
from engine.config import EngineConfig
from engine.control import ControlMethods, PendingControlCalls
from engine.core import EngineCore
from engine.errors import EngineDead, EngineError, Failure
from engine.frames import (
    Abort,
    Activity,
    ControlReply,
    ControlRequest,
    Ready,
    Shutdown,
    Submit,
)
from engine.loop import EngineLoop
from engine.sleep_controller import ControlCall
from engine.stats import EngineStats
from engine.streams import StreamTable
from engine.types import EngineInfo, EngineOutput, Request

LoadCore = Callable[[EngineConfig, LoadProgress | None], EngineCore]


class InlineClient(ControlMethods):
    """A :class:`engine.client.EngineClient` without a process boundary, and hence no restarts.

    Args:
        config: what to load.
        load: makes the engine, in the thread that will run it.
    """

    def __init__(self, config: EngineConfig, *, load: LoadCore = EngineCore.load) -> None:
        self._config = config
        self._load = load
        self._streams = StreamTable(self._abort)
        self._control_calls = PendingControlCalls()
        self._listeners: list[Callable[[EngineOutput], None]] = []
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._engine: EngineLoop | None = None
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._error: EngineError = EngineDead("the engine has not been started")
        self._activity: Activity = "serving"
        self._closed = False

    @property
    def members(self) -> Sequence[EngineClient]:
        """Itself."""
        return (self,)

    @property
    def info(self) -> EngineInfo:
        """A description of the loaded model. Raises EngineDead before ``start`` has returned."""
        if self._info is None:
            raise self._error
        return self._info

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot of statistics."""
        return self._stats

    @property
    def alive(self) -> bool:
        """Whether requests can be submitted now."""
        return self._engine is not None

    @property
    def responsive(self) -> bool:
        """Same as ``alive``, since there is no other process."""
        return self.alive

    @property
    def dead(self) -> bool:
        """Whether the engine has ended; there are no restarts."""
        return self._info is not None and self._engine is None

    @property
    def activity(self) -> Activity:
        """The engine's current activity."""
        return self._activity

    async def start(self, on_progress: LoadProgress | None = None) -> EngineInfo:
        """Load the model. Raises ModelLoadError or EngineDead."""
        self._event_loop = loop = asyncio.get_running_loop()
        loaded: asyncio.Future[tuple[EngineLoop, EngineInfo]] = loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(loaded, on_progress), name="engine", daemon=True
        )
        self._thread.start()
        engine, info = await loaded
        if self._closed:
            engine.inbox.put(Shutdown())
            raise self._error
        self._engine, self._info = engine, info
        return info

    def submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        """Queue requests. Raises EngineDead, or ValueError for an id in use."""
        if self._engine is None:
            raise self._error
        streams: list[RequestStream] = [*self._streams.open(requests)]
        self._engine.inbox.put(Submit(tuple(requests)))
        return streams

    def on_output(self, listener: Callable[[EngineOutput], None]) -> None:
        """Call ``listener`` with each step's output, on the event loop."""
        self._listeners.append(listener)

    async def close(self) -> None:
        """Shut the engine down after the step in flight, or once it has loaded. Idempotent."""
        self._closed = True
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.inbox.put(Shutdown())
        self._end(EngineDead("the engine was closed"))
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    # ------------------------------------------------------------ helpers

    def _run(
        self,
        loaded: asyncio.Future[tuple[EngineLoop, EngineInfo]],
        on_progress: LoadProgress | None,
    ) -> None:
        """The thread: load, then loop."""
        try:
            core = self._load(self._config, on_progress)
        except Exception as error:
            self._call(_resolve, loaded, None, error)
            return
        engine = EngineLoop(
            core,
            lambda output: self._call(self._handle_output, output),
            announce=lambda ready: self._call(self._handle_ready, ready),
        )
        self._call(_resolve, loaded, (engine, core.info), None)
        try:
            engine.run()
        except Exception as error:
            self._call(self._end, EngineDead(Failure.of(error).message))

    def _call(self, function: Callable[..., None], *args: object) -> None:
        assert self._event_loop is not None
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(function, *args)

    def _handle_output(self, output: EngineOutput) -> None:
        self._stats = output.stats
        self._streams.dispatch(output)
        for listener in self._listeners:
            listener(output)

    def _handle_ready(self, ready: Ready) -> None:
        self._info, self._activity = ready.info, ready.activity

    def _abort(self, request_id: str) -> None:
        if self._engine is not None:
            self._engine.inbox.put(Abort((request_id,)))

    async def _control_call(self, request: ControlRequest) -> ControlReply:
        engine = self._engine
        if engine is None:
            raise self._error

        def answer(answered: ControlReply) -> None:
            self._call(self._control_calls.resolve, answered)

        return await self._control_calls.call(
            request, lambda sent: engine.inbox.put(ControlCall(sent, answer))
        )

    def _end(self, error: EngineError) -> None:
        self._engine = None
        self._error = error
        self._streams.fail_all(error)
        self._control_calls.fail_all(error)


def _resolve(
    future: asyncio.Future[tuple[EngineLoop, EngineInfo]],
    result: tuple[EngineLoop, EngineInfo] | None,
    error: Exception | None,
) -> None:
    if future.done():  # the awaiter was cancelled
        if result is not None:
            result[0].inbox.put(Shutdown())
    elif result is not None:
        future.set_result(result)
    elif error is not None:
        future.set_exception(error)

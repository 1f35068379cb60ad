"""The loop that drives an engine for its clients: take commands, and step while there is work.

It runs in a thread of its own: the main thread of the engine process, or a worker thread of
``InlineClient``. Between requests it blocks on its inbox and uses no CPU.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence

from msgspec import structs

from engine.core import EngineCore
from engine.errors import EngineDead, Failure, RequestError
from engine.frames import (
    Abort,
    ControlReply,
    ControlRequest,
    GetSnapshot,
    LifecycleRequest,
    Ready,
    Shutdown,
    StartProfile,
    Submit,
)
from engine.request_intake import OnBegin
from engine.sleep_controller import ControlCall, SleepController
from engine.submission import unpack
from engine.types import EngineOutput, Request
from engine.watchdog import StepWatchdog

logger = logging.getLogger(__name__)

_IDLE_CHECK_S = 1.0  # idle time before the block pool is checked


Command = Submit | Abort | ControlCall | Shutdown


class EngineLoop:
    """Steps ``core`` and passes each output to ``emit``, in the thread that calls ``run``.

    ``inbox.put`` may be called from any thread and from signal handlers.

    Args:
        core: the engine.
        emit: called with each output.
        watchdog: notified when a step begins, and when no step is running.
        announce: called when the loaded model or the engine's activity changes.
        on_begin: told which requests the engine begins to work on; see ``OnBegin``.
    """

    def __init__(
        self,
        core: EngineCore,
        emit: Callable[[EngineOutput], None],
        watchdog: StepWatchdog | None = None,
        announce: Callable[[Ready], None] = lambda ready: None,
        on_begin: OnBegin = lambda begun, withdrawn: None,
    ) -> None:
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._core = core
        core.on_begin = on_begin
        self._emit = emit
        self._watchdog = watchdog or StepWatchdog(None)
        self._sleep_controller = SleepController(core, announce)

    def run(self) -> None:
        """Serve until Shutdown. Raises EngineDead if the device is lost."""
        core = self._core
        while True:
            command = self._next_command()
            while command is not None:  # all queued commands take effect before the next step
                if isinstance(command, Shutdown):
                    return
                self._handle_command(command)
                command = self._poll()
            if core.has_work and not core.idle_s:
                self._watchdog.arm()
                output = core.step()
                self._sleep_controller.follow_ups.end(output)
                self._emit(output)
            if self._sleep_controller.is_pending:
                self._watchdog.disarm()
                for held in self._sleep_controller.advance():
                    self._handle_command(held)

    def _next_command(self) -> Command | None:
        """The next command, if there is one. Blocks only if there is nothing else to do."""
        core = self._core
        if not core.has_work:
            if not self._sleep_controller.is_pending:
                return self._wait_idle()
            idle_s = self._sleep_controller.patience_s
            return self._wait(idle_s) if idle_s else self._poll()
        idle_s = core.idle_s
        return self._wait(idle_s) if idle_s else self._poll()

    def _wait(self, idle_s: float) -> Command | None:
        """The next command, if one comes in time."""
        self._watchdog.disarm()
        try:
            return self.inbox.get(timeout=idle_s)
        except queue.Empty:
            return None

    def _wait_idle(self) -> Command:
        self._watchdog.disarm()
        while self._core.prepare():
            if (command := self._poll()) is not None:
                return command
        try:
            return self.inbox.get(timeout=_IDLE_CHECK_S)
        except queue.Empty:
            self._core.check()
            return self.inbox.get()

    def _poll(self) -> Command | None:
        try:
            return self.inbox.get_nowait()
        except queue.Empty:
            return None

    def _handle_command(self, command: Submit | Abort | ControlCall) -> None:
        if self._sleep_controller.defer(command):
            return
        if isinstance(command, ControlCall):
            if isinstance(command.request, LifecycleRequest):
                self._sleep_controller.begin(command)
                return
            command.on_reply(self._handle_control(command.request))
        elif isinstance(command, Abort):
            for request_id in command.ids:
                self._core.abort(request_id)
        else:
            self._add(unpack(command.requests))

    def _handle_control(self, request: ControlRequest) -> ControlReply:
        profiler = self._core.profiler
        try:
            if isinstance(request, GetSnapshot):
                return ControlReply(None, None, self._core.snapshot())
            if isinstance(request, StartProfile):
                profiler.start(request.num_steps)
                return ControlReply(None, None)
            return ControlReply(profiler.stop(), None)
        except RequestError as error:
            return ControlReply(None, Failure.of(error))
        except Exception as error:
            logger.exception("a control request could not be answered")
            return ControlReply(None, Failure.of(error))

    def _add(self, requests: Sequence[Request]) -> None:
        refused: dict[str, Failure] = {}
        for request in requests:
            asleep = self._sleep_controller.refusal(request)
            if asleep is not None:
                refused[request.id] = asleep
                continue
            try:
                self._core.add(request)
                self._sleep_controller.follow_ups.begin(request)
            except EngineDead:
                raise
            except RequestError as error:
                refused[request.id] = Failure.of(error)
            except Exception as error:  # what it names cannot be read: no reason to end the others
                logger.exception("request %s could not be queued", request.id)
                refused[request.id] = Failure.of(error)
        if refused:
            count = len(refused)
            # There was no step since the one that these statistics follow.
            stats = structs.replace(self._core.stats, step_tokens=0)
            self._emit(
                EngineOutput(
                    ids=tuple(refused),
                    token_ids=((),) * count,
                    finish_reasons=("error",) * count,
                    errors=refused,
                    stats=stats,
                )
            )

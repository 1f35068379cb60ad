"""Sleeping, waking and replacing weights, and what happens to requests meanwhile.

    serving ──Sleep──► falling asleep ──► asleep ──Wake──► waking ──► serving
       └─────Reload──► reloading ───────────────────────────────────► serving

Sleep and Reload first wait for the current requests, and end those that are still running when the
timeout expires. Requests that arrive while the engine falls asleep or sleeps are refused, as it is
unknown how long that will last; but while it falls asleep, those that carry on what has begun are
not, and are awaited (``follow_ups.py``). Requests that arrive during a reload wait for the new
weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from engine.core import EngineCore
from engine.errors import (
    EngineAsleep,
    EngineDead,
    Failure,
    InvalidParameter,
    ModelLoadError,
    RequestError,
    SleepRefused,
)
from engine.follow_ups import FollowUps
from engine.frames import (
    Abort,
    Activity,
    ControlReply,
    ControlRequest,
    Ready,
    Reload,
    Sleep,
    Submit,
)
from engine.types import Request

logger = logging.getLogger(__name__)


class ControlCall(NamedTuple):
    """A control request, and the callback for its reply, which is called in the loop's thread."""

    request: ControlRequest
    on_reply: Callable[[ControlReply], None]


DeferredCommand = Submit | Abort | ControlCall


class SleepController:
    """Puts an engine to sleep, wakes it and reloads it. Used only by its thread, between steps.

    Args:
        core: the engine.
        announce: called on each change of the engine's activity.
    """

    def __init__(self, core: EngineCore, announce: Callable[[Ready], None]) -> None:
        self._core = core
        self._announce = announce
        self._activity: Activity = "serving"
        self._pending_call: ControlCall | None = None  # to be carried out when nothing runs
        self._deadline_s = 0.0  # time.monotonic() at which running requests are ended
        self.follow_ups = FollowUps()
        self._deferred: list[DeferredCommand] = []  # commands received since

    @property
    def is_pending(self) -> bool:
        """Whether a request waits for the engine to become idle."""
        return self._pending_call is not None

    @property
    def patience_s(self) -> float:
        """How long an idle engine may wait for the next request before it falls asleep."""
        if self._pending_call is None or not isinstance(self._pending_call.request, Sleep):
            return 0.0
        return max(0.0, min(self.follow_ups.remaining_s, self._deadline_s - time.monotonic()))

    def refusal(self, request: Request) -> Failure | None:
        """The error to refuse a request with; None: it is accepted."""
        if self._activity == "falling_asleep" and not request.follows:
            return Failure.of(EngineAsleep("The server is being put to sleep; it must be woken."))
        if self._activity == "asleep":
            return Failure.of(EngineAsleep("The server is asleep; it must be woken first."))
        return None

    def defer(self, command: DeferredCommand) -> bool:
        """Hold back a command that must wait for a pending request; false if it need not.

        Control requests are answered in the order they arrive. An abort is both held and carried
        out, since the request it ends may itself be held, and must not overtake it.
        """
        if self._pending_call is None:
            return False
        if isinstance(command, Submit) and self._activity != "reloading":
            return False
        self._deferred.append(command)
        return not isinstance(command, Abort)

    def begin(self, call: ControlCall) -> None:
        """Carry out a LifecycleRequest as soon as nothing runs."""
        request = call.request
        self._deadline_s = time.monotonic()
        if isinstance(request, (Sleep, Reload)):
            self._deadline_s += request.timeout_s
            try:
                self._core.check_can_sleep()
            except SleepRefused as error:  # before any request is ended for it
                call.on_reply(ControlReply(None, Failure.of(error)))
                return
        elif not self._core.is_asleep:  # a Wake of an engine that is awake
            call.on_reply(ControlReply(None, None))
            return
        self._pending_call = call
        if not self._core.is_asleep:
            if isinstance(request, Sleep):
                self._set_activity("falling_asleep")
            elif isinstance(request, Reload):
                self._set_activity("reloading")

    def advance(self) -> list[DeferredCommand]:
        """Carry out the pending request if nothing runs; returns the commands held meanwhile."""
        if self._pending_call is None:
            return []
        if self._core.has_work:
            if time.monotonic() >= self._deadline_s:
                self._core.fail_all(
                    Failure.of(EngineAsleep("The request was ended: the server is being changed."))
                )
            return []
        if self.patience_s:
            return []
        asked, self._pending_call = self._pending_call, None
        failure = self._execute(asked.request)
        self._set_activity("asleep" if self._core.is_asleep else "serving")
        asked.on_reply(ControlReply(None, failure))
        held, self._deferred = self._deferred, []
        return held

    def _execute(self, request: ControlRequest) -> Failure | None:
        """Carry out a request; returns the error, or None on success."""
        core = self._core
        try:
            if isinstance(request, Sleep):
                if not core.is_asleep:
                    core.sleep(request.level)
            elif isinstance(request, Reload):
                core.reload(request.model or core.info.model)
            else:
                self._set_activity("waking")
                core.wake()
        except EngineDead:
            raise
        except RequestError as error:
            return Failure.of(error)
        except ModelLoadError as error:
            if isinstance(request, Reload):
                return Failure.of(InvalidParameter(str(error), param="model_path"))
            return Failure.of(EngineAsleep(f"The engine cannot be woken: {error}"))
        except Exception as error:
            logger.exception("the engine's memory could not be changed")
            return Failure.of(error)
        return None

    def _set_activity(self, activity: Activity) -> None:
        self._activity = activity
        self._announce(Ready(self._core.info, activity))

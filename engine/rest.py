"""When an engine sleeps, wakes and changes its weights: between requests; what comes meanwhile.

    serving ──Sleep──► falling asleep ──► asleep ──Wake──► waking ──► serving
       └─────Reload──► reloading ───────────────────────────────────► serving

Both begin with those who are being served: they go on to their ends, or are ended when the time
that they were given is over. Who comes while the engine falls asleep or sleeps is refused, since
nobody knows for how long; who comes while weights are exchanged waits for the new ones.
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
    RestRefused,
)
from engine.frames import Abort, Activity, Answered, Question, Ready, Reload, Sleep, Submit

logger = logging.getLogger(__name__)


class Asked(NamedTuple):
    """A question, and who is told the answer, in the loop's thread."""

    question: Question
    answer: Callable[[Answered], None]


Held = Submit | Abort | Asked


class Rest:
    """Takes an engine to its rests and back. All calls come between two steps, from their thread.

    Args:
        core: the engine.
        announce: told of each change of what the engine does.
    """

    def __init__(self, core: EngineCore, announce: Callable[[Ready], None]) -> None:
        self._core = core
        self._announce = announce
        self._activity: Activity = "serving"
        self._asked: Asked | None = None  # what is done once nothing runs
        self._ends_s = 0.0  # time.monotonic() at which what runs is ended
        self._held: list[Held] = []  # what came since

    @property
    def is_pending(self) -> bool:
        """Whether somebody waits for the engine to have nothing to do."""
        return self._asked is not None

    @property
    def refusal(self) -> Failure | None:
        """What requests are refused with now; None: they are taken."""
        if self._activity == "falling_asleep":
            return Failure.of(EngineAsleep("The server is being put to sleep; it must be woken."))
        if self._activity == "asleep":
            return Failure.of(EngineAsleep("The server is asleep; it must be woken first."))
        return None

    def holds(self, command: Held) -> bool:
        """Take a command that must wait until the engine has rested; whether it must.

        Questions are answered in the order they come in. An abort of a request that is held must
        not overtake it.
        """
        if self._asked is None:
            return False
        if isinstance(command, Submit) and self._activity != "reloading":
            return False
        self._held.append(command)
        return not isinstance(command, Abort)

    def begin(self, asked: Asked) -> None:
        """Do what a RestQuestion asks for, as soon as nothing runs."""
        question = asked.question
        self._ends_s = time.monotonic()
        if isinstance(question, (Sleep, Reload)):
            self._ends_s += question.timeout_s
            try:
                self._core.check_rest()
            except RestRefused as error:  # before anybody is ended for it
                asked.answer(Answered(None, Failure.of(error)))
                return
        elif not self._core.is_asleep:  # it is to wake, and is awake: who runs goes on
            asked.answer(Answered(None, None))
            return
        self._asked = asked
        if not self._core.is_asleep:
            if isinstance(question, Sleep):
                self._change("falling_asleep")
            elif isinstance(question, Reload):
                self._change("reloading")

    def go_on(self) -> list[Held]:
        """Do what was asked for, if nothing runs; the commands that have waited for it."""
        if self._asked is None:
            return []
        if self._core.has_work:
            if time.monotonic() >= self._ends_s:
                self._core.end_all(
                    Failure.of(EngineAsleep("The request was ended: the server is being changed."))
                )
            return []
        asked, self._asked = self._asked, None
        failure = self._do(asked.question)
        self._change("asleep" if self._core.is_asleep else "serving")
        asked.answer(Answered(None, failure))
        held, self._held = self._held, []
        return held

    def _do(self, question: Question) -> Failure | None:
        """Why it could not be done; None: it is."""
        core = self._core
        try:
            if isinstance(question, Sleep):
                if not core.is_asleep:
                    core.sleep(question.level)
            elif isinstance(question, Reload):
                core.reload(question.model or core.info.model)
            else:
                self._change("waking")
                core.wake()
        except EngineDead:
            raise
        except RequestError as error:
            return Failure.of(error)
        except ModelLoadError as error:
            if isinstance(question, Reload):
                return Failure.of(InvalidParameter(str(error), param="model_path"))
            return Failure.of(EngineAsleep(f"The engine cannot be woken: {error}"))
        except Exception as error:
            logger.exception("the engine's memory could not be changed")
            return Failure.of(error)
        return None

    def _change(self, activity: Activity) -> None:
        self._activity = activity
        self._announce(Ready(self._core.info, activity))

"""Diagnosis of a server that seems stuck: SIGUSR1 logs its tasks and threads.

The threads are dumped first, by the signal handler itself, so it works even if the event loop
hangs. The tasks are logged by the loop, each with its chain of awaits, the innermost call last. A
request's task is named after its id. Only program lines are logged, never contents.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import signal
from types import CodeType, FrameType
from typing import Any

_log = logging.getLogger(__name__)
_MAX_DEPTH = 100


def log_stacks_on_signal(loop: asyncio.AbstractEventLoop) -> None:
    """Install the SIGUSR1 handler."""
    loop.add_signal_handler(signal.SIGUSR1, _log_tasks, loop)
    faulthandler.register(signal.SIGUSR1, chain=True)  # threads, to standard error


def _log_tasks(loop: asyncio.AbstractEventLoop) -> None:
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    for task in tasks:
        _log.warning("task %s", task.get_name())
        for where in _await_chain(task.get_coro()):
            _log.warning("    %s", where)
    _log.warning("these are all of %d tasks", len(tasks))


def _await_chain(waiting: Any) -> list[str]:
    """The chain of awaits from a coroutine inwards; it ends at anything but a coroutine."""
    path: list[str] = []
    while waiting is not None and len(path) < _MAX_DEPTH:
        for kind, awaited in (("cr", "await"), ("gi", "yieldfrom"), ("ag", "await")):
            code: CodeType | None = getattr(waiting, f"{kind}_code", None)
            if code is None:
                continue
            frame: FrameType | None = getattr(waiting, f"{kind}_frame")
            line = code.co_firstlineno if frame is None else frame.f_lineno
            path.append(f"{code.co_filename}:{line} in {code.co_qualname}")
            waiting = getattr(waiting, f"{kind}_{awaited}")
            break
        else:
            path.append(f"{type(waiting).__module__}.{type(waiting).__qualname__}")
            break
    return path

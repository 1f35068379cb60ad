"""Ctrl-C between an engine's steps instead of within one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


class DeferredInterrupts:
    """A context in which Ctrl-C waits for the end of the block; may be nested.

    An exception in the middle of a step would leave a plan whose result never comes, and a
    scheduler that takes the next plan's result for it. A second Ctrl-C is not deferred, since the
    block may never end. Python handles signals in its main thread, so others have nothing to defer.

    Args:
        on_forced: called before a second Ctrl-C is raised within the block.
    """

    def __init__(self, on_forced: Callable[[], None]) -> None:
        self._on_forced = on_forced
        self._depth = 0
        self._num_came = 0
        self._handler: Callable[[int, FrameType | None], object] | None = None

    @property
    def is_active(self) -> bool:
        """Whether a block is being run."""
        return self._depth > 0

    def __enter__(self) -> None:
        if not self._depth and threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):  # otherwise nothing is raised: ignored, or the process ends
                self._handler, self._num_came = handler, 0
                signal.signal(signal.SIGINT, self._note)
        self._depth += 1  # last, so that an exception before it leaves nothing behind

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth or self._handler is None:
            return
        handler, self._handler = self._handler, None
        signal.signal(signal.SIGINT, handler)
        if self._num_came == 1:
            signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._num_came += 1
        if self._num_came > 1 and self._handler is not None:
            self._on_forced()
            self._handler(number, frame)

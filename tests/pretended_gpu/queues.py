"""Streams and events of a device that is not there: work is queued, and done when somebody waits.

A GPU does the work of one stream in order, and that of several in any order that waits allow. Which
one it takes is a matter of luck there; here it is chosen: *eager* streams do their work as it
comes, the others once they are waited for and not before. So what is overwritten too soon or read
too early is so every time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar

import torch

Work = Callable[[], object]


class Violation(AssertionError):
    """What a GPU would not do, or not without making the host wait."""


class Queues:
    """All streams of the device, and which of them is the current one.

    Args:
        eager: ``main``: the default stream does its work as it comes; ``side``: all others do;
            ``none``: no stream does.
    """

    def __init__(self, eager: str = "none") -> None:
        self.eager = eager
        self.main = Stream(self, is_main=True)
        self.streams = [self.main]
        self.current = self.main
        self.capture: list[Work] | None = None  # what a graph under capture holds so far
        self.in_step = False  # the host may not wait

    def new_stream(self) -> Stream:
        """Another stream."""
        self.streams.append(Stream(self))
        return self.streams[-1]

    def do(self, work: Work) -> None:
        """Give the current stream something to do."""
        if self.capture is not None:
            self.capture.append(work)
        else:
            self.current.append(work)

    def wait_for_all(self, why: str) -> None:
        """The host waits until nothing is left to be done."""
        self.refuse_in_capture(why)
        for stream in self.streams:
            stream.run()

    def refuse_wait(self, what: str) -> None:
        """Raise Violation where the host must not wait."""
        if self.in_step:
            raise Violation(f"in a step, the host waits: {what}")
        self.refuse_in_capture(f"waits: {what}")

    def refuse_in_capture(self, why: str) -> None:
        """Raise Violation while a graph is being captured."""
        if self.capture is not None:
            raise Violation(f"while a graph is captured, the host {why}")

    def using(self, stream: Stream | None) -> Using:
        """``torch.cuda.stream``."""
        return Using(self, stream)


class Stream:
    """``torch.cuda.Stream``."""

    def __init__(self, queues: Queues, *, is_main: bool = False) -> None:
        self.queues = queues
        self._is_eager = queues.eager == ("main" if is_main else "side")
        self._items: deque[Work] = deque()
        self._is_running = False

    def append(self, work: Work) -> None:
        """Work behind all that it has."""
        self._items.append(work)
        if self._is_eager and not self._is_running:
            self.run()

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Do what is queued, in order, as far as that is asked for."""
        if self._is_running:
            raise Violation("streams wait for each other")
        self._is_running = True
        try:
            with torch.inference_mode():
                while self._items and not until():
                    self._items.popleft()()
        finally:
            self._is_running = False

    def record_event(self, event: Event | None = None) -> Event:
        """Mark what it has been given so far."""
        event = event or Event(self.queues)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Do nothing more before that is reached."""
        self.queues.refuse_in_capture("joins another stream")
        if (mark := event.mark) is not None:
            self.append(mark.reach)

    def wait_stream(self, other: Stream) -> None:
        """Do nothing more before what the other has been given now."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Let the host wait."""
        self.queues.refuse_wait("for a stream")
        self.run()


class Using:
    """``torch.cuda.StreamContext``: within, a stream is the current one. It may be used again."""

    def __init__(self, queues: Queues, stream: Stream | None) -> None:
        self._queues, self._stream = queues, stream
        self._before: list[Stream] = []

    def __enter__(self) -> None:
        self._before.append(self._queues.current)
        self._queues.current = self._stream or self._queues.current

    def __exit__(self, *raised: object) -> None:
        self._queues.current = self._before.pop()


class _Mark:
    """One recording of an event."""

    def __init__(self, stream: Stream) -> None:
        self.is_reached = False
        self._stream = stream
        stream.append(self._pass)

    def reach(self) -> None:
        """Do what comes before it."""
        if not self.is_reached:
            self._stream.run(lambda: self.is_reached)

    def _pass(self) -> None:
        self.is_reached = True


class Event:
    """``torch.cuda.Event``. One that was never recorded is waited for by nobody."""

    _options: ClassVar[frozenset[str]] = frozenset({"blocking", "enable_timing", "interprocess"})

    def __init__(self, queues: Queues, **options: bool) -> None:
        assert options.keys() <= self._options
        self._queues = queues
        self.mark: _Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark what the stream, or the current one, has been given so far."""
        self._queues.refuse_in_capture("records an event")
        self.mark = _Mark(stream or self._queues.current)

    def synchronize(self) -> None:
        """Let the host wait, where there is anything to wait for."""
        self._queues.refuse_in_capture("waits for an event")
        if not self.query():
            self._queues.refuse_wait("for an event")
        if self.mark is not None:
            self.mark.reach()

    def query(self) -> bool:
        """Whether it was reached."""
        return self.mark is None or self.mark.is_reached

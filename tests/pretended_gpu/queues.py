"""Streams and events of a pretended device: work is queued, and done when it is waited for.

A GPU does the work of one stream in order, and that of several in any order that waits allow. On a
GPU that order is a matter of luck; here it is chosen. *Eager* streams do their work as it arrives,
the others only once they are waited for. So an overwrite or a read that comes too early fails every
time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar

import torch

Work = Callable[[], object]


class Violation(AssertionError):
    """Something that a GPU would not do, or not without making the host wait."""


class Queues:
    """All streams of the device, and the current one.

    Args:
        eager: ``main``: the default stream does its work as it arrives; ``side``: all others do;
            ``none``: no stream does.
    """

    def __init__(self, eager: str = "none") -> None:
        self.eager = eager
        self.main = Stream(self, is_main=True)
        self.streams = [self.main]
        self.current = self.main
        self.capture: list[Work] | None = None  # work recorded by the graph under capture
        self.in_step = False  # the host must not wait

    def new_stream(self) -> Stream:
        """Create another stream."""
        self.streams.append(Stream(self))
        return self.streams[-1]

    def do(self, work: Work) -> None:
        """Queue work on the current stream."""
        if self.capture is not None:
            self.capture.append(work)
        else:
            self.current.append(work)

    def wait_for_all(self, why: str) -> None:
        """Wait on the host until all work is done."""
        self.refuse_in_capture(why)
        for stream in self.streams:
            stream.run()

    def refuse_wait(self, what: str) -> None:
        """Raise Violation if the host must not wait."""
        if self.in_step:
            raise Violation(f"in a step, the host waits: {what}")
        self.refuse_in_capture(f"waits: {what}")

    def refuse_in_capture(self, why: str) -> None:
        """Raise Violation during a graph capture."""
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
        """Queue work after all earlier work."""
        self._items.append(work)
        if self._is_eager and not self._is_running:
            self.run()

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Do queued work in order, until ``until()``."""
        if self._is_running:
            raise Violation("streams wait for each other")
        self._is_running = True
        try:
            with torch.inference_mode():
                while self._items and not until():
                    self._items.popleft()()
        finally:
            self._is_running = False

    def drop(self) -> None:
        """Leave all queued work undone."""
        self._items.clear()

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event after all work queued so far."""
        event = event or Event(self.queues)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Make later work wait for the event."""
        self.queues.refuse_in_capture("joins another stream")
        if (mark := event.mark) is not None:
            self.append(mark.reach)

    def wait_stream(self, other: Stream) -> None:
        """Make later work wait for all work queued so far on another stream."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Make the host wait."""
        self.queues.refuse_wait("for a stream")
        self.run()


class Using:
    """``torch.cuda.StreamContext``: makes a stream the current one. Reusable."""

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
        """Do all work before it."""
        if not self.is_reached:
            self._stream.run(lambda: self.is_reached)

    def _pass(self) -> None:
        self.is_reached = True


class Event:
    """``torch.cuda.Event``. Waiting for one that was never recorded returns at once."""

    _options: ClassVar[frozenset[str]] = frozenset({"blocking", "enable_timing", "interprocess"})

    def __init__(self, queues: Queues, **options: bool) -> None:
        assert options.keys() <= self._options
        self._queues = queues
        self.mark: _Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record all work queued so far on a stream, by default the current one."""
        self._queues.refuse_in_capture("records an event")
        self.mark = _Mark(stream or self._queues.current)

    def synchronize(self) -> None:
        """Make the host wait, if the event was recorded."""
        self._queues.refuse_in_capture("waits for an event")
        if not self.query():
            self._queues.refuse_wait("for an event")
        if self.mark is not None:
            self.mark.reach()

    def query(self) -> bool:
        """Whether the event has been reached."""
        return self.mark is None or self.mark.is_reached

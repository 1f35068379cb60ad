"""What the clients of an engine process have in common: streams that outlive it.

When an engine has died and there is a link to another, every live request is submitted again with
the output that its stream has already received; a token depends on the request's seed and its
position alone, so each stream goes on as if nothing had happened.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from engine.client import RequestStream
from engine.errors import EngineDead, EngineError
from engine.frames import (
    Abort,
    Activity,
    Answered,
    Output,
    Question,
    Ready,
)
from engine.link import EngineLink
from engine.questions import Asker
from engine.streams import Stream, StreamTable
from engine.submission import pack
from engine.types import EngineInfo, EngineOutput, EngineStats, Request

logger = logging.getLogger(__name__)


class RemoteClient(Asker):
    """The part of a :class:`engine.client.EngineClient` that does not depend on who starts and
    restarts the engine: that is its subclasses' to know.

    Args:
        name: which engine, for people.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._streams = StreamTable(self._abort)
        self._listeners: list[Callable[[EngineOutput], None]] = []
        self._link: EngineLink | None = None  # while it may be given requests
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._error: EngineError = EngineDead("the engine has not been started")
        self._dead = False
        self._activity: Activity = "serving"
        self._watchers: list[Callable[[], None]] = []
        self.stats_s = 0.0  # time.monotonic() at which the engine told ``stats``
        self.num_resumed = 0  # requests that went on in another engine

    @property
    def info(self) -> EngineInfo:
        """What was loaded. Raises EngineDead before ``start`` has returned."""
        if self._info is None:
            raise self._error
        return self._info

    @property
    def stats(self) -> EngineStats:
        """The newest snapshot."""
        return self._stats

    @property
    def alive(self) -> bool:
        """Whether requests can be submitted now: false while the engine loads or restarts."""
        return self._link is not None and self._link.open

    @property
    def responds(self) -> bool:
        """Whether the engine's process is there and says so: not while it is stopped."""
        return self._link is not None and self._link.responds

    @property
    def dead(self) -> bool:
        """Whether the engine has been given up for good."""
        return self._dead

    @property
    def activity(self) -> Activity:
        """What the engine does."""
        return self._activity

    def submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        """Queue requests; they are sent when the event loop is next idle.

        Raises:
            EngineDead: the engine is gone, or being restarted.
            ValueError: an id is in use.
        """
        if self._link is None or not self._link.open:
            raise self._error
        streams: list[RequestStream] = [self._streams.open(request) for request in requests]
        self._send(requests)
        return streams

    def on_output(self, listener: Callable[[EngineOutput], None]) -> None:
        """Call ``listener`` with each step's output."""
        self._listeners.append(listener)

    # ------------------------------------------------------------ one of several engines

    @property
    def num_tokens(self) -> int:
        """Tokens of this client's sequences, waiting and running: how busy it keeps the engine."""
        return self._streams.num_tokens

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call ``watcher`` when the engine has died, is there again, has been given up, or has told
        of a change in what it does. Before ``start``."""
        self._watchers.append(watcher)

    def let_go(self) -> list[Stream]:
        """The streams of an engine that has died, for another to take over; what the engine said
        of itself is not true any more, either."""
        self._stats, self.stats_s = EngineStats(), time.monotonic()
        return self._streams.take_all()

    def take_over(self, streams: Sequence[Stream]) -> None:
        """Have streams that another engine has died with go on in this one, which is alive."""
        assert self._link is not None
        requests = self._streams.adopt(streams)
        if requests:
            logger.warning("%d requests continue in %s", len(requests), self._name)
            self.num_resumed += len(requests)
            self._send(requests)

    def _send(self, requests: Sequence[Request]) -> None:
        assert self._link is not None
        for message in pack(requests):
            self._link.send(message)

    async def _ask(self, question: Question) -> Answered:
        if self._link is None or not self._link.open:
            raise self._error
        return await self._link.ask(question)

    # ------------------------------------------------------------ for subclasses

    def _attach(self, link: EngineLink) -> None:
        """There is an engine at the other end of ``link``: whoever waits goes on there."""
        self._link = link
        self._error = EngineDead("the engine is being restarted")  # from when it is not open
        self.take_over(self._streams.take_all())
        if self._watchers:
            link.lost.add_done_callback(lambda _: self._tell())
            self._tell()

    def _change(self, ready: Ready) -> None:
        """What an engine has loaded, or does, is this from now on."""
        self._info, self._activity = ready.info, ready.activity
        self._tell()

    def _give_up(self, error: EngineError) -> None:
        """There will be no other engine."""
        self._dead = True
        self._end(error if isinstance(error, EngineDead) else EngineDead(str(error)))
        self._tell()

    def _end(self, error: EngineDead) -> None:
        self._link = None
        self._error = error
        self._streams.fail_all(error)

    def _tell(self) -> None:
        for watcher in self._watchers:
            watcher()

    def _take(self, news: Output) -> None:
        output = news.output
        self._stats, self.stats_s = output.stats, news.sent_s
        self._streams.dispatch(output)
        for listener in self._listeners:
            listener(output)

    def _abort(self, request_id: str) -> None:
        if self._link is not None:
            self._link.send(Abort((request_id,)))

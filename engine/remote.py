"""The common base of clients of an engine process: streams that survive a restart.

When a dead engine has been replaced, every live request is resubmitted with the output that its
stream has already received. Sampling depends only on the request's seed and the position, so each
stream continues as if nothing had happened.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from engine.client import RequestStream
from engine.control import ControlMethods
from engine.errors import EngineDead, EngineError
from engine.frames import (
    Abort,
    Activity,
    Begun,
    ControlReply,
    ControlRequest,
    Output,
    Ready,
)
from engine.link import EngineLink
from engine.stats import EngineStats
from engine.streams import Stream, StreamTable
from engine.submission import pack
from engine.types import EngineInfo, EngineOutput, Request

logger = logging.getLogger(__name__)


class RemoteClient(ControlMethods):
    """The part of :class:`engine.client.EngineClient` that is the same whoever starts the engine.

    Subclasses know how the engine is started and restarted.

    Args:
        name: the engine's name, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._streams = StreamTable(self._abort)
        self._listeners: list[Callable[[EngineOutput], None]] = []
        self._link: EngineLink | None = None  # set while requests may be sent
        self._pid = 0  # of the engine, as it was announced last
        self._attached_pid = 0  # of the engine that the streams were sent to
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._error: EngineError = EngineDead("the engine has not been started")
        self._dead = False
        self._activity: Activity = "serving"
        self._change_listeners: list[Callable[[], None]] = []
        self.stats_s = 0.0  # time.monotonic() at which the engine sent ``stats``
        self.num_resumed = 0  # requests resumed on another engine

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
        """Whether requests can be submitted now: false while the engine loads or restarts."""
        return self._link is not None and self._link.open

    @property
    def responsive(self) -> bool:
        """Whether the engine process answers; false while it is stopped."""
        return self._link is not None and self._link.responsive

    @property
    def dead(self) -> bool:
        """Whether the engine has been given up for good."""
        return self._dead

    @property
    def activity(self) -> Activity:
        """The engine's current activity."""
        return self._activity

    def submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        """Queue requests; they are sent when the event loop is next idle.

        Raises:
            EngineDead: the engine is dead or restarting.
            ValueError: an id is in use; nothing was queued.
        """
        if self._link is None or not self._link.open:
            raise self._error
        streams: list[RequestStream] = [*self._streams.open(requests)]
        self._send(requests)
        return streams

    def on_output(self, listener: Callable[[EngineOutput], None]) -> None:
        """Call ``listener`` with each step's output."""
        self._listeners.append(listener)

    # ------------------------------------------------------------ one of several engines

    @property
    def num_tokens(self) -> int:
        """Tokens held by this client's sequences, waiting and running: a measure of load."""
        return self._streams.num_tokens

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` when the engine dies, returns, is given up, or changes its activity.

        To be called before ``start``.
        """
        self._change_listeners.append(listener)

    def check_ids(self, requests: Sequence[Request]) -> None:
        """Raise ValueError if an id is in use here, or that of two of the requests."""
        self._streams.check_ids(requests)

    def release_streams(self) -> list[Stream]:
        """Hand over the streams of an engine that has died, or whose connection is lost; its
        statistics are reset."""
        self._reset_stats()
        return self._streams.pop_all(has_died=self._link is None or not self._link.was_hung_up)

    def resume_streams(self, streams: Sequence[Stream]) -> None:
        """Resume the streams of a dead engine on this one, which must be alive."""
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

    async def _control_call(self, request: ControlRequest) -> ControlReply:
        if self._link is None or not self._link.open:
            raise self._error
        return await self._link.call(request)

    # ------------------------------------------------------------ for subclasses

    def _attach(self, link: EngineLink) -> None:
        """Use the engine at the other end of ``link``, and resume all streams there."""
        self._link = link
        self._error = EngineDead("the engine is being restarted")  # for when the link closes
        has_died, self._attached_pid = self._pid != self._attached_pid, self._pid
        self.resume_streams(self._streams.pop_all(has_died=has_died))
        link.lost.add_done_callback(lambda _: self._handle_loss(link))
        self._notify_listeners()

    def _handle_loss(self, link: EngineLink) -> None:
        """Note that nothing runs any more: requests wait for the engine that comes next."""
        if not link.was_hung_up:  # else the engine is alive, and works for other clients
            self._reset_stats(num_waiting=len(self._streams))
        self._notify_listeners()

    def _reset_stats(self, num_waiting: int = 0) -> None:
        self._stats, self.stats_s = EngineStats(num_waiting=num_waiting), time.monotonic()

    def _handle_ready(self, ready: Ready) -> None:
        """Note the loaded model and the activity that the engine reports."""
        self._info, self._activity = ready.info, ready.activity
        self._pid = ready.pid
        self._notify_listeners()

    def _give_up(self, error: EngineError) -> None:
        """Note that there will be no other engine."""
        self._dead = True
        self._end(error if isinstance(error, EngineDead) else EngineDead(str(error)))
        self._notify_listeners()

    def _end(self, error: EngineDead) -> None:
        self._link = None
        self._error = error
        self._streams.fail_all(error)
        self._reset_stats()

    def _notify_listeners(self) -> None:
        for listener in self._change_listeners:
            listener()

    def _handle_output(self, message: Output | Begun) -> None:
        if isinstance(message, Begun):
            self._streams.begin(message.ids, message.withdrawn)
            return
        output = message.output
        self._stats, self.stats_s = output.stats, message.sent_s
        self._streams.dispatch(output)
        for listener in self._listeners:
            listener(output)

    def _abort(self, request_id: str) -> None:
        if self._link is not None:
            self._link.send(Abort((request_id,)))

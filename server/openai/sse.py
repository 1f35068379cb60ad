"""Server-sent events: one write per step of a stream, paced by the client.

The next step is awaited only after the transport has taken the last one, and an unread stream
merges its steps, so a slow client costs one step's text and the transport's buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ApiError, to_api_error, unavailable
from server.http.disconnect import ClientDisconnected, until_disconnect

DONE = b"data: [DONE]\n\n"
_HEARTBEAT = b": keep-alive\n\n"
_log = logging.getLogger(__name__)


class Ending(Protocol):
    """The end of an API's streams: the closing event, and errors after the first event."""

    end: bytes

    def error(self, answer: ApiError) -> bytes:
        """``answer`` as an event."""
        ...


class DoneEnding:
    """OpenAI's chunk streams: an error is an event with its body; ``[DONE]`` always comes last."""

    end = DONE

    def error(self, answer: ApiError) -> bytes:
        """``data: {"error": ...}``."""
        return b"data: %b\n\n" % answer.body()


class EventStream(Response):
    """A response whose body is ``events``, each item one or more whole events.

    The status is sent with the first events, so that an error before them still gets a status of
    its own. A later error is an event, written by ``ending``. While there is nothing to send, a
    comment line is sent every ``heartbeat_s`` seconds.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        heartbeat_s: float,
        headers: Mapping[str, str] | None = None,
        ending: Ending | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(headers)
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # proxies should pass events on as they come
        del self.headers["content-length"]
        self._events = events
        self._heartbeat_s = heartbeat_s
        self._ending: Ending = DoneEnding() if ending is None else ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Raises ClientDisconnected, and what ``events`` raises before its
        first."""
        # A task of its own wakes for each step of the stream. This one would be resumed through
        # every middleware around it, some thirty calls deep. Cancelling it cancels both.
        await asyncio.create_task(self._stream(scope, receive, send))

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = _Writer(self, send)
        ending = self._ending
        heart = asyncio.create_task(self._send_heartbeats(writer))
        try:
            async with until_disconnect(receive), contextlib.aclosing(self._events) as events:
                async for event in events:
                    await writer.write(event)
        except ClientDisconnected:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if not writer.started:
                raise
            request_id = scope["state"]["request_id"]
            if isinstance(error, asyncio.CancelledError):
                answer = unavailable("The server is shutting down.")
            else:
                answer = to_api_error(error, request_id)
            if answer.status == 500:
                _log.exception("stream %s failed", request_id)
            await writer.write(ending.error(answer))
        finally:
            heart.cancel()
        await writer.end(ending.end)

    async def _send_heartbeats(self, writer: _Writer) -> None:
        while True:
            writes = writer.num_writes
            await asyncio.sleep(self._heartbeat_s)
            if writer.num_writes == writes:
                await writer.write(_HEARTBEAT)


class _Writer:
    """Sends the head of a response before its first bytes.

    Both the stream's task and the heartbeat's write; the lock keeps the head first.
    """

    def __init__(self, response: EventStream, send: Send) -> None:
        self._response = response
        self._send = send
        self._lock = asyncio.Lock()
        self.started = False
        self.num_writes = 0

    async def write(self, data: bytes) -> None:
        self.num_writes += 1
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def _start(self) -> None:
        async with self._lock:
            if not self.started:
                status, headers = self._response.status_code, self._response.raw_headers
                head = {"type": "http.response.start", "status": status, "headers": headers}
                await self._send(head)
                self.started = True

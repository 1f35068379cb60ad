"""Server-sent events: one write for each step of a stream, and none ahead of a slow client.

The next step is awaited only when the transport has taken the last one, and a stream that is not
asked merges its steps; so a client that lags costs one step's text and the transport's buffer.
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
from server.http.disconnect import ClientGone, until_disconnect

DONE = b"data: [DONE]\n\n"
_HEARTBEAT = b": keep-alive\n\n"
_log = logging.getLogger(__name__)


class Ending(Protocol):
    """How an API's streams end: with what, and how an error is told after the first event."""

    end: bytes

    def error(self, answer: ApiError) -> bytes:
        """``answer`` as an event."""
        ...


class DoneEnding:
    """OpenAI's chunk streams: an event that holds the error's body; ``[DONE]`` in any case."""

    end = DONE

    def error(self, answer: ApiError) -> bytes:
        """``data: {"error": ...}``."""
        return b"data: %b\n\n" % answer.body()


class EventStream(Response):
    """A response whose body is ``events``, each item one or more whole events.

    The status is sent with the first events, so that what goes wrong before them is still
    answered by a status of its own. After them, an error is an event, as ``ending`` writes it.
    While nothing is to tell, a comment line is sent every ``heartbeat_s`` seconds.
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
        self.headers["x-accel-buffering"] = "no"  # proxies are to pass events on as they come
        del self.headers["content-length"]
        self._events = events
        self._heartbeat_s = heartbeat_s
        self._ending: Ending = DoneEnding() if ending is None else ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Raises ClientGone, and what ``events`` raises before its first."""
        # In a task of its own, which wakes for each step of the stream: this one would be resumed
        # through every middleware around it, some thirty calls deep. Cancelling it cancels both.
        await asyncio.create_task(self._stream(scope, receive, send))

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = _Writer(self, send)
        ending = self._ending
        heart = asyncio.create_task(self._beat(writer))
        try:
            async with until_disconnect(receive), contextlib.aclosing(self._events) as events:
                async for event in events:
                    await writer.write(event)
        except ClientGone:
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

    async def _beat(self, writer: _Writer) -> None:
        while True:
            writes = writer.num_writes
            await asyncio.sleep(self._heartbeat_s)
            if writer.num_writes == writes:
                await writer.write(_HEARTBEAT)


class _Writer:
    """Sends the head of a response before its first bytes.

    Two tasks write, the stream's and the heartbeat's; the lock keeps the head first.
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

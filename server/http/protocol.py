"""uvicorn's httptools protocol, hardened against connections that misbehave below the application.

    first byte ──► headers complete ──► application ──► response complete ──► (keep-alive)
       │  header_timeout_s  │
       │  size and count    │        writes stalled for write_timeout_s: cut
       └── 408 / 431 / 400, in OpenAI's error shape, and close

A client of HTTP/1.0 knows no chunks: its responses without a length end where the connection does.

A few connections more than there are descriptors for (``descriptors.py``) are answered: probes as
usual, so that a crowded server is not taken for a dead one, and others with a 503.
A connection with an unread body is closed in two phases: our side is shut down, then what the
client still sends is discarded for a moment. Closing at once would reset the connection, and the
client would lose the response.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sys
import time
from asyncio import TimerHandle
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from server.errors import ApiError, overloaded
from server.http.context import PROBES
from server.http.standard_headers import new_request_id, standard_headers

MAX_HEADER_BYTES = 64 * 1024  # request line and headers together
MAX_HEADERS = 128
_WRITE_BUFFER_BYTES = 32 * 1024  # per connection, before its writer waits for the client
_UNSENT_BYTES = 32 * 1024  # the same in the kernel, which by itself takes megabytes
_LINGER_S = 2.0
_MAX_EXCESS = 8  # connections above the limit that get an answer at the same time
_EXCESS_TIMEOUT_S = 2.0  # for their headers
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class HardenedProtocol(HttpToolsProtocol):
    """One connection. The module's docstring says what this adds to its base."""

    # Set by ``serve`` on a subclass, since uvicorn makes the instances.
    header_timeout_s: float = 10.0
    write_timeout_s: float = 30.0
    max_connections: int = sys.maxsize

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = True  # a request line may have begun, and the headers are incomplete
        self._in_body = False
        self._discards_input = False  # refused: further input is discarded
        self._is_excess = False  # it is above the limit
        self._header_bytes = 0  # of headers parsed, or received and still incomplete
        self._num_headers = 0
        self._trailer_bytes = 0  # received behind the last part of a body, and still incomplete
        self._is_trailing = False  # of the newest data nothing was part of a head or of a body
        self._begun_s = time.perf_counter()  # when the request began, or the connection
        self._refusal: ApiError | None = None
        self._header_timer: TimerHandle | None = None
        self._write_timer: TimerHandle | None = None
        self._linger_timer: TimerHandle | None = None

    # ------------------------------------------------------------ connection

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Bound the write buffer, the wait for the first headers, and the number of connections."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        # What is on its way to the client does not count, so a fast one is not slowed.
        with contextlib.suppress(OSError, AttributeError):  # not TCP, or not Linux
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        num_excess = len(self.connections) - self.max_connections
        if num_excess > _MAX_EXCESS:
            transport.abort()
            return
        self._is_excess = num_excess > 0
        self._arm_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the timers, and the last request, which refers back to the connection."""
        for timer in (self._header_timer, self._write_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self.cycle = None  # pyright: ignore[reportAttributeAccessIssue]

    def data_received(self, data: bytes) -> None:
        """Parse ``data``, unless the connection has been refused."""
        if self._discards_input or self.transport.is_closing():
            return
        if not self._in_body and _UPGRADE.search(data):
            data = _without_upgrade(data)
        self._is_trailing = True
        super().data_received(data)
        if self.parser is None:
            return
        # A header or a trailer that never ends reaches no callback.
        if self._in_headers:
            self._header_bytes += len(data)
        elif self._in_body and self._is_trailing:
            self._trailer_bytes += len(data)
        if max(self._header_bytes, self._trailer_bytes) > MAX_HEADER_BYTES:
            self._refuse(ApiError(431))

    def pause_writing(self) -> None:
        """Start the timeout for the client to read on."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timeout: the client is reading again."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # ------------------------------------------------------------ parser callbacks

    def on_message_begin(self) -> None:
        """Start counting and timing a request's headers."""
        super().on_message_begin()
        self._in_headers = True
        self._header_bytes = 0
        self._num_headers = 0
        self._begun_s = time.perf_counter()
        if self._header_timer is None:
            self._arm_header_timer()

    def on_url(self, url: bytes) -> None:
        """Count the request line."""
        self._count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header; parsing stops at one too many."""
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            self._refusal = ApiError(431, f"There are more than {MAX_HEADERS} headers.")
            raise ValueError("too many headers")
        self._count_header_bytes(len(name) + len(value))
        # Nothing is read of trailers (RFC 9110, 6.5.1). Those that arrive before the application
        # has begun would else count as headers: a key, for instance.
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Hand the request to the application, unless it names no host, or several."""
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        assert self.parser is not None
        if num_hosts != 1 and self.parser.get_http_version() == "1.1":  # RFC 9112, 3.2
            self._refusal = ApiError(400, "There must be exactly one Host header.")
            raise ValueError("not one host")
        if self._is_excess and self.url.partition(b"?")[0].decode("latin-1") not in PROBES:
            self._refusal = self._overloaded()
            raise ValueError("too many connections")
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # RFC 9110, 10.1.1
        self._in_headers = self._is_trailing = False
        self._in_body = True
        self._header_bytes = self._trailer_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        super().on_headers_complete()
        if self.cycle is not None:
            transport = _LingeringTransport(self)
            self.cycle.transport = transport  # pyright: ignore[reportAttributeAccessIssue]
            self.cycle.keep_alive &= not self._is_excess

    def on_body(self, body: bytes) -> None:
        """Note that the trailers are not there yet."""
        self._is_trailing = False
        self._trailer_bytes = 0
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = _until_close(cycle, app)
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        """Note that the body is complete; another request may follow."""
        self._in_body = False
        super().on_message_complete()

    def _count_header_bytes(self, count: int) -> None:
        self._header_bytes += count
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refusal = ApiError(431)
            raise ValueError("headers too large")

    # ------------------------------------------------------------ refusals

    def send_400_response(self, msg: str) -> None:
        """Called by the base class when parsing fails, including when a callback above raised."""
        self._refuse(self._refusal or ApiError(400, "The HTTP request is malformed."))

    def _refuse(self, error: ApiError) -> None:
        """Respond without the application, and close."""
        if self.transport.is_closing() or self._discards_input:
            return
        self._discards_input = True
        cycle = self.cycle
        if cycle is not None and cycle.response_complete and self._in_body:
            self.linger()  # this request has had its response
            return
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body or cycle.response_started:
                cycle.keep_alive = False  # ours would land inside another: close after that
                return
            cycle.disconnected = True  # its body will never be complete; we respond in its place
            cycle.message_event.set()
        body = error.body()
        head = [STATUS_LINE[error.status]]
        given = error.headers | standard_headers(new_request_id(), self._begun_s)
        headers = [(name.encode(), value.encode()) for name, value in given.items()]
        for name, value in (*self.server_state.default_headers, *headers):
            head += [name, b": ", value, b"\r\n"]
        head += [
            b"content-type: application/json\r\nconnection: close\r\ncontent-length: ",
            str(len(body)).encode(),
            b"\r\n\r\n",
            body,
        ]
        self.transport.write(b"".join(head))
        self.linger()

    def linger(self) -> None:
        """Shut down our side, and discard what the client still sends before closing."""
        self._discards_input = True
        if self._linger_timer is None and not self.transport.is_closing():
            self.flow.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._linger_timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def _overloaded(self) -> ApiError:
        return overloaded(f"{self.max_connections} connections")

    def _arm_header_timer(self) -> None:
        timeout_s = self.header_timeout_s
        if self._is_excess:
            timeout_s = min(timeout_s, _EXCESS_TIMEOUT_S)
        self._header_timer = self.loop.call_later(timeout_s, self._on_header_timeout)

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        if self._is_excess:
            self._refuse(self._overloaded())
        elif self._header_bytes or self.scope is not None:
            self._refuse(ApiError(408, "The request's headers took too long to arrive."))
        else:
            self.transport.close()  # a connection that never sent a byte


def _without_upgrade(data: bytes) -> bytes:
    """``data``, the start of a request, with any Upgrade header renamed.

    A server may ignore an offer to upgrade (RFC 9110, 7.8), but httptools would read the body of
    such a request as the other protocol. Java's client offers h2c on every first request.
    """
    head, end, body = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + body


def _until_close(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """``app`` for a client of HTTP/1.0: the end of the connection ends a response without a length
    (RFC 9112, 6.3), which the base class would send in chunks.

    The base class closes the connection after every response to such a client.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_open = False  # the response has no length

        async def send_unchunked(message: Message) -> None:
            nonlocal is_open
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                is_open = b"content-length" not in names
                if is_open:
                    cycle.chunked_encoding = False
            elif is_open:  # what the base class expects is what comes
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unchunked)

    return answer


class _LingeringTransport:
    """The transport of a response: closes in two phases while the request's body is unread."""

    __slots__ = ("_protocol", "is_closing", "write")

    def __init__(self, protocol: HardenedProtocol) -> None:
        self._protocol = protocol
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        """Close, at once if nothing more is to be read."""
        cycle = self._protocol.cycle
        if cycle is not None and cycle.more_body and cycle.response_complete:
            self._protocol.linger()
        else:
            self._protocol.transport.close()

"""A minimal-overhead HTTP/1.1 client for streamed completions.

The generator often shares cores with the server it measures, so a streamed token may cost a few
microseconds here, not the hundreds that a general client takes. httptools parses the responses,
msgspec decodes only the fields that are counted, each connection serves one request at a time, and
nothing is awaited between two tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec


class _Delta(msgspec.Struct):
    content: str | None = None
    role: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_ERROR_BYTES = 8192  # of an error's body that are kept
_MESSAGE_CHARS = 200


class StreamRecord(msgspec.Struct):
    """What was observed of one streamed request. Times are ``time.perf_counter()`` seconds."""

    due_s: float = 0.0  # scheduled send time; latencies count from here
    sent_s: float = 0.0
    end_s: float = 0.0
    token_times_s: list[float] = []  # arrival of each event with output
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0  # as reported by the server's usage
    finish_reason: str | None = None
    failure: str | None = None  # the kind of failure, if the request was not answered in full
    message: str = ""  # what the server said to that


class HttpError(Exception):
    """A response with a status other than 200, with the start of its body."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}: {_error_message(body)}")
        self.status = status


class Client:
    """A pool of keep-alive connections to one server.

    Args:
        url: the server's address, with or without ``/v1``.
        api_key: sent as a bearer token if given.
        timeout_s: the time limit of one request, in seconds.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:  # from brackets, or the port
            parts, port = urlsplit(""), 0
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"'{url}' is not an address like http://127.0.0.1:8000")
        self._host, self._port = parts.hostname, port
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._idle: deque[_Connection] = deque()
        lines = [f"Host: {parts.netloc}", "Content-Type: application/json", "Accept: */*"]
        if api_key:
            lines.append(f"Authorization: Bearer {api_key}")
        self._headers = "\r\n".join(lines)

    async def fetch(self, method: str, path: str, body: Any = None) -> bytes:
        """Send a request and return the whole response body.

        Raises:
            HttpError: the status is not 200.
            OSError, TimeoutError: the server is unreachable, or does not answer in time.
        """
        received = bytearray()
        async with asyncio.timeout(self._timeout_s):
            status = await self._exchange(
                self._encode(method, path, body), lambda data, _: received.extend(data)
            )
        if status != 200:
            raise HttpError(status, bytes(received))
        return bytes(received)

    async def stream(
        self, path: str, body: dict[str, Any], *, due_s: float | None = None
    ) -> StreamRecord:
        """Post ``body``, read the stream to its end and record the arrival times.

        Never raises for anything a server can do: failures are in the record.
        """
        record = StreamRecord(due_s=time.perf_counter() if due_s is None else due_s)
        reader = _EventReader(record)

        def sent() -> None:
            record.sent_s = time.perf_counter()

        try:
            async with asyncio.timeout(self._timeout_s):
                payload = self._encode("POST", path, body)
                status = await self._exchange(payload, reader.feed, sent)
            record.failure = reader.failure_reason() if status == 200 else f"http_{status}"
            if status != 200:
                record.message = _error_message(reader.start)
        except TimeoutError:
            record.failure = "timeout"
        except OSError:
            record.failure = "cut" if record.sent_s else "connect"
        except msgspec.DecodeError:
            record.failure = "bad_event"
        record.end_s = time.perf_counter()
        return record

    def close(self) -> None:
        """Close all connections."""
        while self._idle:
            self._idle.pop().close()

    def _encode(self, method: str, path: str, body: Any) -> bytes:
        payload = b"" if body is None else msgspec.json.encode(body)
        head = f"{method} {self._base}{path} HTTP/1.1\r\n{self._headers}\r\n"
        return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload

    async def _exchange(
        self, payload: bytes, on_data: Any, on_sent: Callable[[], None] = lambda: None
    ) -> int:
        """Run one exchange and return its status.

        If the server closes a kept-alive connection before sending any of the response, the request
        has not failed (RFC 9112, section 9.3.1): it is retried on another connection.
        """
        while True:
            connection = await self._acquire()
            on_sent()
            try:
                return await connection.exchange(payload, on_data)
            except _ConnectionDropped:
                continue  # terminates: a new connection is never retried
            finally:  # after a failure or cancellation, unread bytes may remain
                if connection.is_complete:
                    self._release(connection)
                else:
                    connection.close()

    async def _acquire(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            _Connection, self._host, self._port, ssl=self._ssl
        )
        return connection

    def _release(self, connection: _Connection) -> None:
        if connection.is_usable:
            self._idle.append(connection)
        else:
            connection.close()


class _ConnectionDropped(ConnectionResetError):
    """The server closed a reused connection without sending any response."""


class _Connection(asyncio.Protocol):
    """One connection with one exchange at a time; httptools calls the ``on_*`` methods."""

    def __init__(self) -> None:
        self.is_usable = True
        self.is_complete = False  # whether the last exchange ended with a whole response
        self._num_exchanges = 0
        self._has_received = False  # whether any byte of the current response has arrived
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[int] | None = None
        self._parser: Any = None
        self._on_data: Any = None
        self._now_s = 0.0

    async def exchange(self, request: bytes, on_data: Any) -> int:
        """Send ``request``, feed ``on_data(bytes, arrival_s)``, and return the status."""
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self.is_complete = self._has_received = False
        self._num_exchanges += 1
        self._parser = httptools.HttpResponseParser(self)
        self._on_data = on_data
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        self.is_usable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's have no base class

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        self._has_received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            # It wraps an exception of our own callbacks, which is its context.
            self._fail(error.__context__ or error)
        except httptools.HttpParserError:
            self._fail(ConnectionError("the answer is not HTTP"))

    def connection_lost(self, exc: Exception | None) -> None:
        given_up = self._num_exchanges > 1 and not self._has_received
        kind = _ConnectionDropped if given_up else ConnectionResetError
        self._fail(kind("the server closed the connection"))

    def on_body(self, body: bytes) -> None:
        self._on_data(body, self._now_s)

    def on_message_complete(self) -> None:
        self.is_complete = True
        self.is_usable = self.is_usable and self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._parser.get_status_code())

    def _fail(self, error: BaseException) -> None:
        self.is_usable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class _EventReader:
    """Parses the server-sent events of one stream and counts them into a record."""

    def __init__(self, record: StreamRecord) -> None:
        self.start = b""  # of the body: all of it, if it is an error's
        self._record = record
        self._buffer = b""
        self._ended = False
        self._failed = False
        self._decode = msgspec.json.Decoder(_Event).decode

    def feed(self, data: bytes, arrival_s: float) -> None:
        """Parse the next bytes of the body, which arrived at ``arrival_s``."""
        if len(self.start) < _ERROR_BYTES:
            self.start += data
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # blank lines, comments (heartbeats), event names
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self._ended = True
            else:
                self._handle_event(self._decode(payload), arrival_s)

    def failure_reason(self) -> str | None:
        """Why the stream is not a complete answer, or None if it is."""
        record = self._record
        if self._failed:
            return "error_event"
        if not self._ended:
            return "no_done"
        if record.finish_reason is None:
            return "no_finish_reason"
        if record.output_tokens < len(record.token_times_s):
            return "usage_too_low"  # more events with output than tokens: one count is wrong
        return None

    def _handle_event(self, event: _Event, arrival_s: float) -> None:
        record = self._record
        if event.error is not None:
            self._failed = True
            record.message = _message_of(event.error)
        if event.usage is not None:
            record.prompt_tokens = event.usage.prompt_tokens
            record.output_tokens = event.usage.completion_tokens
            details = event.usage.prompt_tokens_details
            record.cached_tokens = (details.cached_tokens or 0) if details else 0
        for choice in event.choices:
            if choice.finish_reason is not None:
                record.finish_reason = choice.finish_reason
            delta = choice.delta
            if choice.text or (
                delta and (delta.content or delta.reasoning or delta.reasoning_content)
            ):
                record.token_times_s.append(arrival_s)


def _error_message(body: bytes) -> str:
    """The message in the body of an error in OpenAI's shape, or else the start of the body."""
    try:
        return _message_of(msgspec.json.decode(body)["error"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return _shorten(body.decode("utf-8", "replace"))


def _message_of(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else None
    return _shorten(message if isinstance(message, str) else str(error))


def _shorten(text: str) -> str:
    return " ".join(text.split())[:_MESSAGE_CHARS]


def raw_json(body: bytes) -> Any:
    """Decode a JSON response. Raises ValueError if the body is not JSON."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(body)
    raise ValueError("the server did not answer with JSON")

"""Limits of request bodies on every route: size, content type and stalls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError

_CLOSE = {"connection": "close"}  # the rest of the body will not be read


class BodyLimitMiddleware:
    """ASGI middleware around ``receive``.

    A declared length over the limit is refused before any byte is read. A chunked body is refused
    as soon as it passes the limit, so no more than that is buffered. A body that stalls is aborted.

    Args:
        app: the wrapped application.
        max_body_bytes: the limit.
        stall_timeout_s: the longest time without new bytes.
        max_bytes_by_path: limits by path, for routes that stream their bodies.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        stall_timeout_s: float,
        max_bytes_by_path: Mapping[str, int] | None = None,
    ) -> None:
        self._app = app
        self._max_bytes = max_body_bytes
        self._max_bytes_by_path = dict(max_bytes_by_path or {})
        self._stall_timeout_s = stall_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request with a bounded body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_bytes = self._max_bytes_by_path.get(scope["path"], self._max_bytes)
        _check_headers(scope, max_bytes)
        received = 0
        complete = False

        async def guarded() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()  # waits for the client to disconnect
            try:
                async with asyncio.timeout(self._stall_timeout_s):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, headers=_CLOSE) from None
            complete = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > max_bytes:
                raise _too_large(max_bytes)
            return message

        await self._app(scope, guarded, send)


def check_json_type(scope: Scope) -> None:
    """Raise ApiError (415) unless the body is declared to be JSON."""
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    kind = kinds[0].split(b";", 1)[0].strip().lower() if kinds else b""
    if len(kinds) != 1 or kind != b"application/json":
        raise ApiError(415)


def _check_headers(scope: Scope, max_bytes: int) -> None:
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > max_bytes:
            raise _too_large(max_bytes)
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            raise ApiError(415, "Compressed request bodies are not supported.", headers=_CLOSE)


def _too_large(max_bytes: int) -> ApiError:
    message = f"The request body is larger than {max_bytes} bytes."
    return ApiError(413, message, headers=_CLOSE)

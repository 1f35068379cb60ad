"""Bounds on request bodies, on every route: their size, their kind, and how long they may stall."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError

_CLOSE = {"connection": "close"}  # what is left of the body will not be read


class BodyGuard:
    """ASGI middleware around ``receive``.

    A declared length over the limit is refused before a byte is read; a chunked body is refused
    as soon as it passes the limit, having held no more than that; a body that stalls is given up.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, stall_timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_body_bytes
        self._stall_timeout_s = stall_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request with a bounded body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._check_headers(scope)
        received = 0
        complete = False

        async def guarded() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()  # waits for the client to go away
            try:
                async with asyncio.timeout(self._stall_timeout_s):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, headers=_CLOSE) from None
            complete = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, guarded, send)

    def _check_headers(self, scope: Scope) -> None:
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > self._max_bytes:
                raise self._too_large()
            if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
                raise ApiError(415, "Compressed bodies are not read.", headers=_CLOSE)

    def _too_large(self) -> ApiError:
        message = f"The request body is larger than {self._max_bytes} bytes."
        return ApiError(413, message, headers=_CLOSE)


def check_json_type(scope: Scope) -> None:
    """Raise ApiError (415) unless the body is declared to be JSON."""
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    kind = kinds[0].split(b";", 1)[0].strip().lower() if kinds else b""
    if len(kinds) != 1 or kind != b"application/json":
        raise ApiError(415)

"""Permission for pages of other origins to call the API from a browser (the Fetch standard's CORS).

A browser asks before it sends a key (the preflight), so this is answered before keys are checked,
and reveals only that the origin is allowed. Keys travel in a header that the page sets. Cookies are
not used, so credentials mode is never allowed.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_METHODS = "GET, POST, DELETE, OPTIONS"
_MAX_AGE_S = "600"
# Response headers that a page may read besides the few that the standard always exposes.
_EXPOSED = ", ".join(
    (
        "x-request-id",
        "request-id",
        "retry-after",
        "x-should-retry",
        "openai-processing-ms",
        "openai-version",
        "x-quire-ignored-params",
        *(
            f"x-ratelimit-{what}-{of}"
            for of in ("requests", "tokens")
            for what in ("limit", "remaining", "reset")
        ),
    )
)


class Cors:
    """ASGI middleware that admits pages of ``origins``; ``*`` admits all."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        allowed = self._allowed(headers.get("origin"))
        if allowed is None:
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers, allowed, send)
        else:

            async def send_with_leave(message: Message) -> None:
                if message["type"] == "http.response.start":
                    answer = MutableHeaders(scope=message)
                    answer["access-control-allow-origin"] = allowed
                    answer["access-control-expose-headers"] = _EXPOSED
                    answer.add_vary_header("origin")
                await send(message)

            await self._app(scope, receive, send_with_leave)

    def _allowed(self, origin: str | None) -> str | None:
        """The value of the allow-origin header; None to omit it."""
        if origin is None:
            return None
        if "*" in self._origins:
            return "*"
        return origin if origin in self._origins else None


async def _preflight(headers: Headers, allowed: str, send: Send) -> None:
    answer = {
        "access-control-allow-origin": allowed,
        "access-control-allow-methods": _METHODS,
        # Client libraries send headers of their own, which change between versions; none is
        # dangerous.
        "access-control-allow-headers": headers.get("access-control-request-headers", "*"),
        "access-control-max-age": _MAX_AGE_S,
        "vary": "origin, access-control-request-headers",
    }
    raw = [(name.encode(), value.encode("latin-1")) for name, value in answer.items()]
    await send({"type": "http.response.start", "status": 204, "headers": raw})
    await send({"type": "http.response.body", "body": b""})

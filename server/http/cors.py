"""Leave for pages of other origins to call the API from a browser (the Fetch standard's CORS).

A browser asks before it sends a key (the preflight), so this is answered before keys are asked
for, and it tells nothing but that the origin is welcome. Keys travel in a header that the page
sets; cookies are not used, so credentials mode is never allowed.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_METHODS = "GET, POST, DELETE, OPTIONS"
_MAX_AGE_S = "600"
# What a page may read of an answer besides the few headers that every page may.
_EXPOSED = ", ".join(
    (
        "x-request-id",
        "retry-after",
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
    """ASGI middleware that lets pages of ``origins`` in; ``*`` is every page there is."""

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
        """What the answer names as allowed; None where nothing is to be said."""
        if origin is None:
            return None
        if "*" in self._origins:
            return "*"
        return origin if origin in self._origins else None


async def _preflight(headers: Headers, allowed: str, send: Send) -> None:
    answer = {
        "access-control-allow-origin": allowed,
        "access-control-allow-methods": _METHODS,
        # Client libraries send headers of their own, which change; none of them can do harm.
        "access-control-allow-headers": headers.get("access-control-request-headers", "*"),
        "access-control-max-age": _MAX_AGE_S,
        "vary": "origin, access-control-request-headers",
    }
    raw = [(name.encode(), value.encode("latin-1")) for name, value in answer.items()]
    await send({"type": "http.response.start", "status": 204, "headers": raw})
    await send({"type": "http.response.body", "body": b""})

"""API keys: a guard before every route except liveness and the page that asks for a key.

The guard runs before routing, so that without a key unknown paths, the documentation and the
metrics reveal nothing. The route itself checks the key's rights, once it is known: see
``scopes.py``.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from server.access.keyring import KeyRing
from server.access.scopes import OPEN_PATHS
from server.errors import ApiError


class ApiKeyMiddleware:
    """ASGI middleware that admits requests with a valid key and attaches their caller."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request if it has a valid key."""
        if scope["type"] != "http" or not self._keys.requires_key or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        caller = self._keys.find(_key_of(scope))
        if caller is None:
            raise ApiError(401, headers={"www-authenticate": "Bearer"})
        state = scope.setdefault("state", {})
        state["caller"] = caller
        try:
            await self._app(scope, receive, send)
        finally:
            begun = state.pop("begun", None)
            if begun is not None:
                begun.end()


def _key_of(scope: Scope) -> bytes:
    """The bearer token, or the key as Anthropic's clients send it; empty if there is none.

    Raises:
        ApiError: 400, there are several.
    """
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) > 1:
        raise ApiError(400, "There must be only one Authorization header.")
    if given:
        scheme, _, token = given[0].partition(b" ")
        return token.strip() if scheme.lower() == b"bearer" else b""
    other = [value for name, value in scope["headers"] if name == b"x-api-key"]
    if len(other) > 1:
        raise ApiError(400, "There must be only one x-api-key header.")
    return other[0].strip() if other else b""

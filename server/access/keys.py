"""API keys: one guard in front of every route but liveness.

The guard stands before routing, so that an unknown path, the documentation and the metrics
tell nobody anything without a key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError

_OPEN_PATHS = frozenset({"/health"})


class KeyGuard:
    """ASGI middleware that lets requests with one of ``keys`` pass as a bearer token.

    Only digests are kept, and all of them are compared in constant time whatever the outcome,
    so that an answer's timing tells nothing of how close a guess was.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, if it has a key."""
        if scope["type"] == "http" and self._digests and scope["path"] not in _OPEN_PATHS:
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) > 1:
            raise ApiError(400, "There must be only one Authorization header.")
        scheme, _, token = (given[0] if given else b"").partition(b" ")
        digest = _digest(token.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(401, headers={"www-authenticate": "Bearer"})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

"""The scope that each route requires of a key.

Routes are matched by their template, so no spelling of a path bypasses the check. A route that
matches no row is for administrators: a forgotten route is closed, not open.
"""

from __future__ import annotations

from fastapi import Request

from server.access.caller import Scope, caller_of
from server.errors import ApiError

# These need no key: they reveal nothing of the server but its existence.
OPEN_PATHS = frozenset({"/health", "/dashboard"})
_ANY_KEY: tuple[str, ...] = ("/health", "/ready", "/version", "/v1/models", "/v1/usage")
_BY_PREFIX: dict[str, Scope] = {  # the first match counts
    "/v1/files": "files",
    "/v1/batches": "batches",
    "/v1/chat": "inference",
    "/v1/completions": "inference",
    "/v1/audio": "inference",
    "/v1/responses": "inference",
    "/v1/conversations": "inference",
    "/v1/messages/batches": "batches",
    "/v1/messages": "inference",
    "/v1/embeddings": "inference",
    "/v1/rerank": "inference",
    "/v2/rerank": "inference",
    "/rerank": "inference",
    "/v1/score": "inference",
    "/score": "inference",
    "/tokenize": "inference",
    "/detokenize": "inference",
    "/metrics": "metrics",
}


def scope_of(template: str) -> Scope | None:
    """The scope that a route requires; None if any key will do."""
    if _covers(_ANY_KEY, template):
        return None
    for prefix, scope in _BY_PREFIX.items():
        if _covers((prefix,), template):
            return scope
    return "admin"


async def check_access(request: Request) -> None:
    """Check that the caller may use the route, within its limits. A dependency of every route.

    Raises:
        ApiError: 403 without the scope, 429 beyond a limit or quota.
    """
    scope = scope_of(request.scope["route"].path)
    caller = caller_of(request)
    if scope is not None and scope not in caller.scopes:
        message = f"This API key lacks the scope '{scope}'."
        raise ApiError(403, message)
    if scope == "inference" and request.method == "POST":
        caller.account.begin()
        # Ended by the key guard, after the whole response has been sent.
        request.scope["state"]["begun"] = caller.account


def _covers(prefixes: tuple[str, ...], template: str) -> bool:
    return any(template == prefix or template.startswith(f"{prefix}/") for prefix in prefixes)

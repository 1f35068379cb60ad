"""What a key must be allowed to do for each route.

By the route's own template, so that no spelling of a path gets round it. A route that no row
names is for administrators: one that is forgotten here is closed, not open.
"""

from __future__ import annotations

from fastapi import Request

from server.access.caller import Scope, caller_of
from server.errors import ApiError

# These need no key: they tell nothing of the server but that it is there.
OPEN_PATHS = frozenset({"/health", "/dashboard"})
_ANY_KEY: tuple[str, ...] = ("/health", "/ready", "/version", "/v1/models", "/v1/usage")
_BY_PREFIX: dict[str, Scope] = {  # the first that fits counts
    "/v1/files": "files",
    "/v1/batches": "batches",
    "/v1/chat": "inference",
    "/v1/completions": "inference",
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
    """The scope that a route asks for; None where any key will do."""
    if _covers(_ANY_KEY, template):
        return None
    for prefix, scope in _BY_PREFIX.items():
        if _covers((prefix,), template):
            return scope
    return "admin"


async def permit(request: Request) -> None:
    """A dependency of every route: whether its caller may use it, and has requests left.

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
        # Ended by the key guard, once the whole answer has been sent.
        request.scope["state"]["begun"] = caller.account


def _covers(prefixes: tuple[str, ...], template: str) -> bool:
    return any(template == prefix or template.startswith(f"{prefix}/") for prefix in prefixes)

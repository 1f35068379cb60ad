"""The caller of a request, as determined by the key guard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from starlette.requests import HTTPConnection

from server.access.account import Account

Scope = Literal["inference", "files", "batches", "metrics", "admin"]
ALL_SCOPES: frozenset[Scope] = frozenset(get_args(Scope))
NO_ACCOUNT = Account()


@dataclass(frozen=True)
class Caller:
    """The owner of a request's key, and the request's deadline.

    Stored objects (responses, files, batches) belong to ``tenant`` and are invisible to others.
    """

    tenant: str = ""  # the key's name in the key file; empty for callers without one
    scopes: frozenset[Scope] = ALL_SCOPES
    weight: float = 1.0  # of its share, under the fair scheduling policy
    account: Account = NO_ACCOUNT  # its limits and usage
    background: bool = False  # of a batch: runs only in capacity that others leave
    deadline_s: float | None = None  # deadline of the request; time.monotonic()
    trace: Mapping[str, str] | None = None  # trace-context headers of the request


ANONYMOUS = Caller()  # without keys, and for keys given by --api-key, which have all rights


def caller_of(request: HTTPConnection) -> Caller:
    """The caller of ``request``."""
    return caller_of_scope(request.scope)


def caller_of_scope(scope: Mapping[str, Any]) -> Caller:
    """The caller, from an ASGI scope."""
    return scope.get("state", {}).get("caller", ANONYMOUS)

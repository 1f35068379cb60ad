"""Who sent a request: what the key guard found out, for the endpoints and the engine to use."""

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
    """The owner of the key that a request came with, and how long this request may take.

    Stored things (responses, files, batches) belong to ``tenant``; others do not see them.
    """

    tenant: str = ""  # the key's name in the key file; empty without one, for all alike
    scopes: frozenset[Scope] = ALL_SCOPES
    weight: float = 1.0  # of its share, under the fair scheduling policy
    account: Account = NO_ACCOUNT  # its limits, and what is left of them
    background: bool = False  # nobody waits: a batch's lines take what all others leave
    deadline_s: float | None = None  # time.monotonic() until which it waits for this answer
    trace: Mapping[str, str] | None = None  # headers of the trace that the request is part of


ANYONE = Caller()  # without keys, and for keys given by --api-key, which may do everything


def caller_of(request: HTTPConnection) -> Caller:
    """Who sent ``request``."""
    return caller_in(request.scope)


def caller_in(scope: Mapping[str, Any]) -> Caller:
    """The same, for an ASGI scope."""
    return scope.get("state", {}).get("caller", ANYONE)

"""A request's deadline: its own, or the default of the server's settings.

A client sends it in the ``x-quire-deadline-ms`` header or the field ``deadline_ms``, relative to
the arrival of its request; if both are given, the earlier one counts. A request that misses its
deadline ends with a 504 and releases all that it held.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from fastapi import Request

from engine.errors import DeadlineExceeded
from server.access.caller import Caller, caller_of
from server.errors import bad_field

HEADER = "x-quire-deadline-ms"
MAX_DEADLINE_MS = 7 * 24 * 3_600_000  # a week


def caller_with_deadline(request: Request, field_ms: int | None, default_s: float | None) -> Caller:
    """The caller of ``request``: who sent it, its trace, and its deadline from now on.

    Args:
        request: its header is read.
        field_ms: the body's field, in milliseconds.
        default_s: the deadline of a request that sets none, in seconds.

    Raises:
        ApiError: 400, the header is not a number of milliseconds.
    """
    now_s = time.monotonic()
    limits_ms = [ms for ms in (field_ms, _read_header(request)) if ms is not None]
    limit_s = min(limits_ms) / 1000 if limits_ms else default_s
    caller = caller_of(request)
    trace = request.scope["state"].get("trace")
    if trace is not None:
        caller = replace(caller, trace=trace)
    return caller if limit_s is None else replace(caller, deadline_s=now_s + limit_s)


@contextlib.asynccontextmanager
async def until_deadline(caller: Caller) -> AsyncIterator[None]:
    """Cancel the block at the caller's deadline, for work that the engine does not watch.

    Raises:
        DeadlineExceeded: the block had not finished by then.
    """
    if caller.deadline_s is None:
        yield
        return
    limit = asyncio.timeout(caller.deadline_s - time.monotonic())
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded from None


def _read_header(request: Request) -> int | None:
    text = request.headers.get(HEADER)
    if text is None:
        return None
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0
    if not 1 <= value <= MAX_DEADLINE_MS:
        raise bad_field(HEADER, f"must be a number of milliseconds from 1 to {MAX_DEADLINE_MS}")
    return value

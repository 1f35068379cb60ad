"""Responding to requests that are not streamed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from server.access.caller import Caller, caller_of
from server.http.disconnect import until_disconnect
from server.openai.deadline import caller_with_deadline, until_deadline
from server.openai.endpoint import json_response, read_request, state_of
from server.pooling.protocol import PoolingRequest
from server.state import ServerState

_BodyT = TypeVar("_BodyT", bound=PoolingRequest)


class Call(Protocol):
    """A validated and encoded request."""

    async def complete(self) -> Any:
        """The whole response."""
        ...


async def respond(
    request: Request,
    shape: type[_BodyT],
    prepare: Callable[[ServerState, Caller, _BodyT], Awaitable[Call]],
) -> Response:
    """Answer a request; abort it if its client disconnects or its deadline passes.

    Args:
        request: its body is read here.
        shape: the body's shape.
        prepare: validates a caller's body against the model, and encodes it.
    """
    state = state_of(request)
    state.check_capacity(caller_of(request))
    body, headers = await read_request(request, shape)
    caller = caller_with_deadline(request, body.deadline_ms, state.settings.default_deadline_s)
    async with until_disconnect(request.receive), until_deadline(caller):
        answer = await (await prepare(state, caller, body)).complete()
    return json_response(answer, headers)

"""The endpoints that a batch may name, and their handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from server.access.caller import Caller
from server.anthropic.call import MessageCall
from server.anthropic.inputs import MessagesRequest
from server.errors import bad_field
from server.openai.api_model import ApiModel
from server.openai.chat import ChatCall
from server.openai.completions import CompletionCall
from server.openai.endpoint import Call, read_fields
from server.openai.inputs import ChatRequest, CompletionRequest
from server.openai.responses.call import ResponseCall
from server.openai.responses.inputs import ResponsesRequest
from server.pooling.embeddings import EmbeddingCall
from server.pooling.protocol import EmbeddingRequest
from server.state import ServerState

Handler = Callable[[ServerState, Caller, dict[str, Any]], Awaitable[Any]]
_BodyT = TypeVar("_BodyT", bound=ApiModel)


async def _embed(state: ServerState, caller: Caller, fields: dict[str, Any]) -> Any:
    """The response of /v1/embeddings."""
    body, _ = read_fields(state.settings, EmbeddingRequest, fields)
    return await (await EmbeddingCall.prepare(state, caller, body)).complete()


async def _complete(
    shape: type[_BodyT],
    prepare: Callable[[ServerState, Caller, _BodyT], Awaitable[Call]],
    state: ServerState,
    caller: Caller,
    fields: dict[str, Any],
) -> Any:
    """The whole response of a generation endpoint."""
    body, _ = read_fields(state.settings, shape, fields)
    for field in ("stream", "background", "deadline_ms"):
        if getattr(body, field, None):
            raise bad_field(field, "is not available in a batch")
    return await (await prepare(state, caller, body)).complete()


# By endpoint, for /v1/batches.
HANDLERS: MappingProxyType[str, Handler] = MappingProxyType(
    {
        "/v1/chat/completions": partial(_complete, ChatRequest, ChatCall.prepare),
        "/v1/completions": partial(_complete, CompletionRequest, CompletionCall.prepare),
        "/v1/responses": partial(_complete, ResponsesRequest, ResponseCall.prepare),
        "/v1/embeddings": _embed,
    }
)
# The endpoint of the Messages API's own batches.
MESSAGES = "/v1/messages"
_MESSAGE_HANDLERS: dict[str, Handler] = {
    MESSAGES: partial(_complete, MessagesRequest, MessageCall.prepare)
}


def handler_of(endpoint: str) -> Handler:
    """The handler of a batch's lines."""
    return _MESSAGE_HANDLERS.get(endpoint) or HANDLERS[endpoint]

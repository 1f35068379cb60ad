"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.access.caller import caller_of
from server.anthropic.call import MessageCall, MessageEnding, prepare_conversation
from server.anthropic.errors import PREFIX
from server.anthropic.inputs import MessagesRequest, TokenCountRequest
from server.anthropic.outputs import MessageAnswer, MessageEvent, MessagesError, TokenCount
from server.http.disconnect import until_disconnect
from server.openai.deadline import caller_with_deadline, until_deadline
from server.openai.endpoint import json_response, read_request, serve_call, state_of
from server.openai.openapi_schema import describe

router = APIRouter()


@router.post(
    PREFIX,
    summary="Answer messages (Anthropic's API)",
    openapi_extra=describe(
        MessagesRequest, MessageAnswer, chunk=MessageEvent, typed=True, error=MessagesError
    ),
)
async def create_message(request: Request) -> Response:
    """Continue a conversation in Anthropic's shapes, as one object or as a stream of events."""
    state = state_of(request)
    state.check_capacity(caller_of(request))
    body, headers = await read_request(request, MessagesRequest)
    caller = caller_with_deadline(request, body.deadline_ms, state.settings.default_deadline_s)

    async def prepare() -> MessageCall:
        async with until_deadline(caller):
            return await MessageCall.prepare(state, caller, body)

    stream, ending = bool(body.stream), MessageEnding()
    return await serve_call(request, prepare, stream=stream, headers=headers, ending=ending)


@router.post(
    f"{PREFIX}/count_tokens",
    summary="Count the tokens of messages (Anthropic's API)",
    openapi_extra=describe(TokenCountRequest, TokenCount, error=MessagesError),
)
async def count_tokens(request: Request) -> Response:
    """Count the input tokens of a request."""
    body, headers = await read_request(request, TokenCountRequest)
    async with until_disconnect(request.receive):
        conversation = await prepare_conversation(state_of(request), caller_of(request), body)
    return json_response(TokenCount(input_tokens=len(conversation.prompt)), headers)

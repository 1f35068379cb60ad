"""/v1/responses and what lies below it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, NoReturn

from fastapi import APIRouter, Query, Request
from starlette.responses import Response as HttpResponse

from server.access.caller import caller_of
from server.errors import ApiError, bad_field, shorten
from server.http.disconnect import until_disconnect
from server.openai.deadline import caller_with_deadline, until_deadline
from server.openai.endpoint import json_response, read_request, serve_call, state_of
from server.openai.openapi_schema import describe
from server.openai.pagination import After, Limit, Order, make_page
from server.openai.responses.background import BackgroundResponses
from server.openai.responses.call import (
    ResponseCall,
    StreamEnding,
    new_response_id,
    prepare_conversation,
)
from server.openai.responses.events import Numbering, StreamEvent
from server.openai.responses.inputs import (
    InputTokensRequest,
    ResponsesRequest,
    include_problem,
)
from server.openai.responses.items import read_item
from server.openai.responses.outputs import InputTokens, ItemList, Response, ResponseDeleted
from server.openai.sse import EventStream
from server.store.responses import ResponseStore

router = APIRouter()

StreamFlag = Annotated[bool, Query(description="Send the events instead of the response.")]
StartingAfter = Annotated[
    int | None, Query(ge=0, lt=2**31, description="The number of the last event that is known.")
]
Include = Annotated[
    list[str] | None, Query(description="No effect: what is stored is returned. As in a request.")
]


@router.post(
    "/v1/responses",
    summary="Create a response",
    openapi_extra=describe(ResponsesRequest, Response, chunk=StreamEvent, typed=True),
)
async def create_response(request: Request) -> HttpResponse:
    """Create a response: whole, as a stream of typed events, or in the background."""
    body, headers = await read_request(request, ResponsesRequest)
    state = state_of(request)
    if not body.background:  # which waits for its place
        state.check_capacity(caller_of(request))
    # A background response has no deadline unless the request sets one.
    limit_s = None if body.background else state.settings.default_deadline_s
    caller = caller_with_deadline(request, body.deadline_ms, limit_s)
    ending = StreamEnding()
    # Whoever follows a background response may lag behind, and counts on its own.
    numbering = Numbering() if body.background else ending.numbering

    async def prepare() -> ResponseCall:
        async with until_deadline(caller):
            return await ResponseCall.prepare(state, caller, body, numbering)

    if not body.background:
        streams = bool(body.stream)
        return await serve_call(request, prepare, stream=streams, headers=headers, ending=ending)
    async with until_disconnect(request.receive):
        call = await prepare()
    # A job that has started continues after a disconnect.
    job = await _background(request).start(call, caller.tenant)
    if body.stream:
        return _stream(request, job.follow(-1, ending.numbering), ending, headers)
    return json_response(call.response, headers)


@router.post(
    "/v1/responses/input_tokens",
    summary="Count the tokens of a request",
    openapi_extra=describe(InputTokensRequest, InputTokens),
)
async def count_input_tokens(request: Request) -> HttpResponse:
    """Count the input tokens of a request."""
    body, headers = await read_request(request, InputTokensRequest)
    state = state_of(request)
    caller = caller_with_deadline(request, body.deadline_ms, state.settings.default_deadline_s)
    async with until_disconnect(request.receive), until_deadline(caller):
        prepared = await prepare_conversation(state, caller, body, new_response_id())
    num_tokens = len(prepared.conversation.prompt)
    return json_response(InputTokens(input_tokens=num_tokens), headers)


@router.get(
    "/v1/responses/{response_id}",
    summary="A stored response",
    openapi_extra=describe(None, Response, chunk=StreamEvent, typed=True),
)
async def retrieve_response(
    response_id: str,
    request: Request,
    stream: StreamFlag = False,
    starting_after: StartingAfter = None,
    include: Include = None,
) -> HttpResponse:
    """Retrieve a response; with ``stream=true`` the events of a background response."""
    # OpenAI's clients write lists in a URL with brackets.
    if problem := include_problem([*(include or ()), *request.query_params.getlist("include[]")]):
        raise bad_field("include", problem)
    caller = caller_of(request)
    background = _background(request)
    response = await background.find(response_id, caller.tenant)
    if response is None:
        _not_found(response_id)
    if not stream:
        return json_response(response)
    if not response.background:
        raise bad_field("stream", "is for responses that were made with 'background'")
    after = -1 if starting_after is None else starting_after
    ending = StreamEnding()
    ending.numbering.next_number = after + 1
    events = background.follow(response_id, caller.tenant, after, ending.numbering)
    return _stream(request, events, ending, {})


@router.delete(
    "/v1/responses/{response_id}",
    summary="Delete a stored response",
    openapi_extra=describe(None, ResponseDeleted),
)
async def delete_response(response_id: str, request: Request) -> HttpResponse:
    """Delete a response; if it is still being generated, it is stopped."""
    if not await _background(request).delete(response_id, caller_of(request).tenant):
        _not_found(response_id)
    return json_response(ResponseDeleted(id=response_id))


@router.post(
    "/v1/responses/{response_id}/cancel",
    summary="Cancel a background response",
    openapi_extra=describe(None, Response),
)
async def cancel_response(response_id: str, request: Request) -> HttpResponse:
    """Cancel a background response; one that has ended is unchanged."""
    response = await _background(request).cancel(response_id, caller_of(request).tenant)
    if response is None:
        _not_found(response_id)
    return json_response(response)


@router.get(
    "/v1/responses/{response_id}/input_items",
    summary="List the input items of a stored response",
    openapi_extra=describe(None, ItemList),
)
async def list_input_items(
    response_id: str,
    request: Request,
    limit: Limit = 20,
    order: Order = "desc",
    after: After = None,
) -> HttpResponse:
    """List the request's own items page by page, by default newest first."""
    store = ResponseStore(state_of(request).database)
    if await store.find(response_id, caller_of(request).tenant) is None:
        _not_found(response_id)
    page = await store.input_items(response_id, after=after, limit=limit, ascending=order == "asc")
    if page is None:
        raise bad_field("after", "is not the id of an input item of this response")
    data = [read_item(item.body) for item in page.items]
    return json_response(make_page(ItemList, data, has_more=page.has_more))


def _background(request: Request) -> BackgroundResponses:
    return request.app.state.responses


def _stream(
    request: Request,
    events: AsyncGenerator[bytes],
    ending: StreamEnding,
    headers: Mapping[str, str],
) -> EventStream:
    heartbeat_s = state_of(request).settings.heartbeat_s
    return EventStream(events, heartbeat_s=heartbeat_s, headers=headers, ending=ending)


def _not_found(id: str) -> NoReturn:
    raise ApiError(404, f"Response '{shorten(id, 80)}' was not found.", param="response_id")

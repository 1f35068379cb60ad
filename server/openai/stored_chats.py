"""/v1/chat/completions below its POST: the completions stored with ``store``."""

from __future__ import annotations

import re
from typing import Literal, NoReturn

from fastapi import APIRouter, Request
from msgspec import Struct
from starlette.responses import Response

from server.access.caller import caller_of
from server.errors import ApiError, bad_field, shorten
from server.openai.api_model import ApiModel
from server.openai.chat_recorder import (
    StoredChatCompletion,
    StoredMessage,
    read_chat,
    read_message,
)
from server.openai.endpoint import json_response, read_request, state_of
from server.openai.metadata import Metadata
from server.openai.openapi_schema import Description, describe
from server.openai.pagination import After, Limit, Order, make_page
from server.store.chats import ChatStore, StoredChat

router = APIRouter()

_PATH = "/v1/chat/completions"
_LABEL = re.compile(r"metadata\[(.*)\]", re.DOTALL)


class ChatUpdate(ApiModel):
    """The labels that replace all of a stored completion's labels."""

    metadata: Metadata | None


class ChatCompletionList(Struct, kw_only=True):
    """A page of stored completions."""

    object: Literal["list"] = "list"
    data: list[StoredChatCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredMessageList(Struct, kw_only=True):
    """A page of the messages of a stored completion's request."""

    object: Literal["list"] = "list"
    data: list[StoredMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ChatCompletionDeleted(Struct, kw_only=True):
    """The response to a deletion."""

    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: bool = True


def _describe_list() -> Description:
    """Describe the filter by labels: one parameter per label, which FastAPI cannot express."""
    description = describe(None, ChatCompletionList)
    labels = {"type": "object", "additionalProperties": {"type": "string"}}
    description["parameters"] = [
        {
            **{"name": "metadata", "in": "query", "required": False},
            **{"style": "deepObject", "explode": True, "schema": labels},
            "description": "Labels that all completions of the list carry: `metadata[name]=value`.",
        }
    ]
    return description


@router.get(_PATH, summary="List the stored completions", openapi_extra=_describe_list())
async def list_chat_completions(
    request: Request,
    model: str | None = None,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
) -> Response:
    """List the caller's stored completions, by default oldest first."""
    found = await _store(request).list(
        caller_of(request).tenant,
        model=model,
        metadata=_labels(request),
        after=after,
        limit=limit + 1,
        ascending=order == "asc",
    )
    if found is None:
        raise bad_field("after", "is not the id of a stored completion")
    data = [read_chat(chat) for chat in found[:limit]]
    return json_response(make_page(ChatCompletionList, data, has_more=len(found) > limit))


@router.get(
    _PATH + "/{completion_id}",
    summary="A stored completion",
    openapi_extra=describe(None, StoredChatCompletion),
)
async def retrieve_chat_completion(completion_id: str, request: Request) -> Response:
    """Retrieve one of the caller's stored completions."""
    return json_response(read_chat(await _find(request, completion_id)))


@router.post(
    _PATH + "/{completion_id}",
    summary="Label a stored completion",
    openapi_extra=describe(ChatUpdate, StoredChatCompletion),
)
async def update_chat_completion(completion_id: str, request: Request) -> Response:
    """Replace all labels of a stored completion."""
    body, headers = await read_request(request, ChatUpdate)
    tenant = caller_of(request).tenant
    chat = await _store(request).update_metadata(completion_id, tenant, body.metadata or {})
    if chat is None:
        _not_found(completion_id)
    return json_response(read_chat(chat), headers)


@router.delete(
    _PATH + "/{completion_id}",
    summary="Delete a stored completion",
    openapi_extra=describe(None, ChatCompletionDeleted),
)
async def delete_chat_completion(completion_id: str, request: Request) -> Response:
    """Delete one of the caller's stored completions."""
    if not await _store(request).delete(completion_id, caller_of(request).tenant):
        _not_found(completion_id)
    return json_response(ChatCompletionDeleted(id=completion_id))


@router.get(
    _PATH + "/{completion_id}/messages",
    summary="The messages that a stored completion answers",
    openapi_extra=describe(None, StoredMessageList),
)
async def list_chat_messages(
    completion_id: str,
    request: Request,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
) -> Response:
    """List the request's messages, by default in their order."""
    chat = await _find(request, completion_id)
    position: int | None = None
    if after is not None:
        place = after.removeprefix(f"{chat.id}-")
        if place == after or not re.fullmatch(r"[0-9]{1,9}", place, re.ASCII):
            raise bad_field("after", "is not the id of a message of this completion")
        position = int(place)
    found = await _store(request).messages(
        chat.id, after=position, limit=limit + 1, ascending=order == "asc"
    )
    data = [read_message(chat.id, position, body) for position, body in found[:limit]]
    return json_response(make_page(StoredMessageList, data, has_more=len(found) > limit))


def _store(request: Request) -> ChatStore:
    return ChatStore(state_of(request).database)


def _labels(request: Request) -> dict[str, str]:
    """The labels to filter a list by. Raises ApiError (400) if one is repeated."""
    labels: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        match = _LABEL.fullmatch(name)
        if match is None:
            continue
        if match[1] in labels:
            raise bad_field(shorten(name, 80), "is given twice")
        labels[match[1]] = value
    return labels


async def _find(request: Request, id: str) -> StoredChat:
    chat = await _store(request).find(id, caller_of(request).tenant)
    return chat if chat is not None else _not_found(id)


def _not_found(id: str) -> NoReturn:
    message = f"There is no stored chat completion '{shorten(id, 80)}'; is 'store' left out?"
    raise ApiError(404, message, param="completion_id")

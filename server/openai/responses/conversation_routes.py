"""/v1/conversations: growing lists of items, kept as long as they are used."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from fastapi import APIRouter, Request
from msgspec import Struct
from pydantic import Field, PlainValidator
from starlette.responses import Response

from server.access.caller import caller_of
from server.errors import ApiError, bad_field, shorten
from server.openai.api_model import ApiModel
from server.openai.endpoint import json_response, read_request, state_of
from server.openai.metadata import Metadata
from server.openai.openapi_schema import describe
from server.openai.outputs import to_json
from server.openai.pagination import After, Limit, Order, make_page
from server.openai.responses.call import to_stored_items
from server.openai.responses.context import conversation_not_found, resolve_items
from server.openai.responses.input_items import InputItem, NewItem, read_items
from server.openai.responses.item_fields import kind_of_item
from server.openai.responses.items import Item, read_item
from server.openai.responses.outputs import ItemList
from server.openai.unread_fields import unread_fields
from server.store.conversations import (
    ConversationStore,
    DuplicateItem,
    StoredConversation,
)

router = APIRouter()

_PATH = "/v1/conversations"
_MAX_ITEMS = 20  # that are added at once


def _read_new_items(value: Any) -> list[NewItem]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError("must be a list of items")
    if len(value) > _MAX_ITEMS:
        raise ValueError(f"holds {len(value)} items; at most {_MAX_ITEMS} are added at once")
    return read_items(value, "items")


NewItems = Annotated[
    list[NewItem],
    PlainValidator(_read_new_items, json_schema_input_type=list[InputItem] | None),
]


class NewConversation(ApiModel):
    """A conversation's initial items and labels."""

    items: NewItems = Field(default_factory=list)
    metadata: Metadata | None = None

    @classmethod
    def unread(cls, body: Mapping[str, Any]) -> list[str]:
        """As above, of the items."""
        return unread_fields(body.get("items"), kind_of_item, "items")


class ConversationUpdate(ApiModel):
    """The labels that replace all of a conversation's labels."""

    metadata: Metadata | None


class ItemsToAdd(ApiModel):
    """Items to append to a conversation."""

    items: NewItems

    @classmethod
    def unread(cls, body: Mapping[str, Any]) -> list[str]:
        """As above, of the items."""
        return unread_fields(body["items"], kind_of_item, "items")


class Conversation(Struct, kw_only=True):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int  # Unix time, s
    metadata: dict[str, str]


class ConversationDeleted(Struct, kw_only=True):
    """The response to a deletion."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


@router.post(
    _PATH,
    summary="Begin a conversation",
    openapi_extra=describe(NewConversation, Conversation, body_required=False),
)
async def create_conversation(request: Request) -> Response:
    """Create a conversation, optionally with items."""
    body, headers = await read_request(request, NewConversation, optional=True)
    conversation = StoredConversation(
        id=f"conv_{uuid.uuid4().hex}",
        tenant=caller_of(request).tenant,
        created_at=int(time.time()),
        metadata=to_json(body.metadata or {}),
    )
    items = await _resolve(request, body.items)
    try:
        await _store(request).create(conversation, to_stored_items(items))
    except DuplicateItem as error:
        raise _duplicate_item_error(items, error) from None
    return json_response(_to_conversation(conversation), headers)


@router.get(
    _PATH + "/{conversation_id}",
    summary="Describe a conversation",
    openapi_extra=describe(None, Conversation),
)
async def retrieve_conversation(conversation_id: str, request: Request) -> Response:
    """Retrieve one of the caller's conversations."""
    return json_response(_to_conversation(await _find(request, conversation_id)))


@router.post(
    _PATH + "/{conversation_id}",
    summary="Label a conversation",
    openapi_extra=describe(ConversationUpdate, Conversation),
)
async def update_conversation(conversation_id: str, request: Request) -> Response:
    """Replace all labels of a conversation."""
    body, headers = await read_request(request, ConversationUpdate)
    tenant, metadata = caller_of(request).tenant, to_json(body.metadata or {})
    conversation = await _store(request).update_metadata(conversation_id, tenant, metadata)
    if conversation is None:
        raise conversation_not_found(conversation_id)
    return json_response(_to_conversation(conversation), headers)


@router.delete(
    _PATH + "/{conversation_id}",
    summary="Forget a conversation",
    openapi_extra=describe(None, ConversationDeleted),
)
async def delete_conversation(conversation_id: str, request: Request) -> Response:
    """Delete a conversation with its items; responses that were made in it stay."""
    if not await _store(request).delete(conversation_id, caller_of(request).tenant):
        raise conversation_not_found(conversation_id)
    return json_response(ConversationDeleted(id=conversation_id))


@router.get(
    _PATH + "/{conversation_id}/items",
    summary="List the items of a conversation",
    openapi_extra=describe(None, ItemList),
)
async def list_conversation_items(
    conversation_id: str,
    request: Request,
    limit: Limit = 20,
    order: Order = "desc",
    after: After = None,
) -> Response:
    """List a conversation's items page by page, by default newest first."""
    await _find(request, conversation_id)
    page = await _store(request).page(
        conversation_id, after=after, limit=limit, ascending=order == "asc"
    )
    if page is None:
        raise bad_field("after", "is not the id of an item of this conversation")
    items = [read_item(item.body) for item in page.items]
    return json_response(_to_page(items, has_more=page.has_more))


@router.post(
    _PATH + "/{conversation_id}/items",
    summary="Add items to a conversation",
    openapi_extra=describe(ItemsToAdd, ItemList),
)
async def create_conversation_items(conversation_id: str, request: Request) -> Response:
    """Append items to a conversation unchanged, without generating."""
    body, headers = await read_request(request, ItemsToAdd)
    items = await _resolve(request, body.items)
    tenant = caller_of(request).tenant
    try:
        found = await _store(request).append(conversation_id, tenant, to_stored_items(items))
    except DuplicateItem as error:
        raise _duplicate_item_error(items, error) from None
    if not found:
        raise conversation_not_found(conversation_id)
    return json_response(_to_page(items), headers)


@router.get(
    _PATH + "/{conversation_id}/items/{item_id}",
    summary="An item of a conversation",
    openapi_extra=describe(None, Item),
)
async def retrieve_conversation_item(
    conversation_id: str, item_id: str, request: Request
) -> Response:
    """Retrieve one item."""
    await _find(request, conversation_id)
    tenant = caller_of(request).tenant
    found = await _store(request).find_item(item_id, tenant, conversation_id)
    return json_response(read_item(found) if found is not None else _raise_item_not_found(item_id))


@router.delete(
    _PATH + "/{conversation_id}/items/{item_id}",
    summary="Delete an item of a conversation",
    openapi_extra=describe(None, Conversation),
)
async def delete_conversation_item(
    conversation_id: str, item_id: str, request: Request
) -> Response:
    """Delete an item and return the conversation."""
    conversation = await _find(request, conversation_id)
    if not await _store(request).delete_item(conversation_id, item_id):
        _raise_item_not_found(item_id)
    return json_response(_to_conversation(conversation))


def _store(request: Request) -> ConversationStore:
    return ConversationStore(state_of(request).database)


async def _find(request: Request, id: str) -> StoredConversation:
    conversation = await _store(request).find(id, caller_of(request).tenant)
    if conversation is None:
        raise conversation_not_found(id)
    return conversation


async def _resolve(request: Request, items: Sequence[NewItem]) -> list[Item]:
    state = state_of(request)
    return await resolve_items(state.database, state.files, caller_of(request), items, "items")


def _to_conversation(conversation: StoredConversation) -> Conversation:
    return Conversation(
        id=conversation.id,
        created_at=conversation.created_at,
        metadata=msgspec.json.decode(conversation.metadata, type=dict[str, str]),
    )


def _to_page(items: list[Item], *, has_more: bool = False) -> ItemList:
    return make_page(ItemList, items, has_more=has_more)


def _duplicate_item_error(items: Sequence[Item], error: DuplicateItem) -> ApiError:
    """If two items share an id, the error names the later one."""
    index = max(index for index, item in enumerate(items) if item.id == error.id)
    return bad_field(f"items.{index}.id", "is the id of another item of the conversation")


def _raise_item_not_found(id: str) -> NoReturn:
    message = f"The conversation has no item '{shorten(id, 80)}'."
    raise ApiError(404, message, param="item_id")

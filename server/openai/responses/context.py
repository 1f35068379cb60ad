"""The history that a request continues: earlier responses, references, and truncation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from engine.errors import RequestError
from server.access.caller import Caller
from server.errors import ApiError, bad_field, shorten
from server.openai.responses.input_items import NewItem, Reference
from server.openai.responses.inputs import ResponseInput
from server.openai.responses.item_files import inline_files
from server.openai.responses.items import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    Item,
    MessageItem,
    ReasoningItem,
    read_item,
)
from server.openai.responses.outputs import FINAL_STATUSES
from server.store.conversations import ConversationStore
from server.store.database import Database
from server.store.files import FileStore
from server.store.responses import MAX_CHAIN, ResponseStore

_MAX_HISTORY_BYTES = 32 * 2**20  # including images; checked before tokens are counted
_TOO_LONG = "context_length_exceeded"
_T = TypeVar("_T")


async def resolve_items(
    database: Database, files: FileStore, caller: Caller, items: Sequence[NewItem], field: str
) -> list[Item]:
    """The items of a request's ``field``, with references and files resolved.

    Raises ApiError (400) that names a reference that does not exist.
    """
    resolved: list[Item] = []
    for index, item in enumerate(items):
        if isinstance(item, Reference):
            found = await ResponseStore(database).find_item(item.id, caller.tenant)
            if found is None:
                found = await ConversationStore(database).find_item(item.id, caller.tenant)
            if found is None:
                problem = f"refers to {shorten(item.id, 80)!r}, which is not stored here"
                raise bad_field(f"{field}.{index}.id", problem)
            resolved.append(read_item(found))
        else:
            await inline_files(files, caller, item, f"{field}.{index}")
            resolved.append(item)
    return resolved


async def load_history(database: Database, caller: Caller, request: ResponseInput) -> list[Item]:
    """The items that ``request`` continues: a conversation, or a response and all before it.

    Raises ApiError (400, 404) if it does not exist, if one of the responses does not exist or has
    not ended, or if there are too many items.
    """
    if request.conversation is not None:
        return await _load_conversation(ConversationStore(database), caller, request.conversation)
    previous = request.previous_response_id
    if previous is None:
        return []
    store = ResponseStore(database)
    chain = await store.chain(previous, caller.tenant)
    if chain is None:
        raise ApiError(
            400,
            f"The previous response '{shorten(previous, 80)}', or one before it, was not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if chain[0].previous_id is not None:
        raise bad_field("previous_response_id", f"continues more than {MAX_CHAIN} responses")
    if chain[-1].status not in FINAL_STATUSES:
        raise bad_field("previous_response_id", "names a response that has not ended yet")
    bodies = await store.items([link.id for link in chain], max_bytes=_MAX_HISTORY_BYTES)
    return _decode_items(bodies, "previous_response_id", "What the previous responses hold")


def conversation_not_found(id: str, param: str = "conversation_id") -> ApiError:
    """The 404 for a conversation that does not exist, or is another tenant's."""
    return ApiError(404, f"There is no conversation '{shorten(id, 80)}'.", param=param)


async def _load_conversation(store: ConversationStore, caller: Caller, id: str) -> list[Item]:
    if await store.find(id, caller.tenant) is None:
        raise conversation_not_found(id, "conversation")
    bodies = await store.items(id, max_bytes=_MAX_HISTORY_BYTES)
    return _decode_items(bodies, "conversation", "What the conversation holds")


def _decode_items(bodies: Sequence[bytes] | None, param: str, what: str) -> list[Item]:
    if bodies is None:
        message = f"{what} is more than {_MAX_HISTORY_BYTES >> 20} MiB."
        raise ApiError(400, message, param=param, code=_TOO_LONG)
    return [read_item(body) for body in bodies]


async def truncate_to_fit(
    items: Sequence[Item], prepare: Callable[[Sequence[Item]], Awaitable[_T]], *, truncate: bool
) -> _T:
    """Apply ``prepare`` to the conversation, with ``truncate`` to as much of it as fits.

    As few of the oldest items as possible are dropped, such that the rest begins with a user
    message; if that does not suffice, such that it begins with any item. A call stays with its
    output, and reasoning with what it led to. System messages and the last item always stay.

    Raises what ``prepare`` raises, also when nothing fits.
    """
    try:
        return await prepare(items)
    except (ApiError, RequestError) as error:
        if not truncate or error.code != _TOO_LONG:
            raise
        refused = error
    cuts = _cut_points(items)
    of_users = [cut for cut in cuts if _is_user_message(items[cut])]
    for places in (of_users, cuts):
        found = await _bisect_cuts(items, places, prepare)
        if found is not None:
            return found
    raise refused


async def _bisect_cuts(
    items: Sequence[Item], cuts: Sequence[int], prepare: Callable[[Sequence[Item]], Awaitable[_T]]
) -> _T | None:
    """Find the first cut that fits by bisection, and return what ``prepare`` makes after it."""
    low, high = 0, len(cuts)  # cuts before low do not fit; those from high on do
    best: _T | None = None
    while low < high:
        middle = (low + high) // 2
        try:
            best = await prepare(_drop_before(items, cuts[middle]))
            high = middle
        except (ApiError, RequestError) as error:
            if error.code != _TOO_LONG:
                raise
            low = middle + 1
    return best


def _cut_points(items: Sequence[Item]) -> list[int]:
    """The items before which a conversation may be cut."""
    cuts: list[int] = []
    unanswered: set[str] = set()
    for index, item in enumerate(items):
        if _is_user_message(item):
            unanswered.clear()  # they can no longer be answered
        after_reasoning = index > 0 and isinstance(items[index - 1], ReasoningItem)
        if index > 0 and not (unanswered or after_reasoning):
            cuts.append(index)
        if isinstance(item, CallItem | CustomCallItem):
            unanswered.add(item.call_id)
        elif isinstance(item, CallOutputItem):
            unanswered.discard(item.call_id)
    return cuts


def _is_user_message(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role == "user"


def _drop_before(items: Sequence[Item], start: int) -> list[Item]:
    kept = [
        item
        for item in items[:start]
        if isinstance(item, MessageItem) and item.role in ("system", "developer")
    ]
    return [*kept, *items[start:]]

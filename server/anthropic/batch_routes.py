"""/v1/messages/batches: messages answered within a day, when the server is otherwise idle.

They are batches like those of ``/v1/batches`` and use the same runner. Only the input is written
here instead of uploaded, and the results have this API's shapes.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from msgspec import Struct
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from server.access.caller import caller_of
from server.anthropic.batch_results import results
from server.anthropic.errors import PREFIX
from server.anthropic.outputs import MessagesError, to_rfc3339
from server.batches.handlers import MESSAGES
from server.batches.lines import MAX_LINES, WINDOW, WINDOW_S
from server.errors import ApiError, bad_field, shorten
from server.http.public_address import public_address
from server.openai.api_model import ApiModel
from server.openai.endpoint import json_response, read_request, state_of
from server.openai.openapi_schema import Description, describe
from server.openai.outputs import to_json
from server.openai.pagination import make_page
from server.state import ServerState
from server.store.batches import ACTIVE_STATUSES, StoredBatch
from server.store.database import StoreError, reason_of
from server.store.files import StoredFile, new_file_id

router = APIRouter()

_PATH = f"{PREFIX}/batches"
_MAX_LIST = 1000
_PURPOSE = "message_batch"  # of the input file, which is among the caller's files


class BatchedMessage(ApiModel):
    """One request of a batch."""

    custom_id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]  # of POST /v1/messages; validated when the request runs


class MessageBatchRequest(ApiModel):
    """POST /v1/messages/batches."""

    requests: Annotated[list[BatchedMessage], Field(min_length=1, max_length=MAX_LINES)]


class MessageBatchCounts(Struct):
    """Counts of a batch's requests; all are processing until the batch has ended."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(Struct, kw_only=True):
    """A batch. Times are in RFC 3339 format."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None = None
    results_url: str | None


class MessageBatchList(Struct, kw_only=True):
    """A page of batches."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeleted(Struct, kw_only=True):
    """The response to a deletion."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


def _describe(answer: type[Struct] | str, *, can_conflict: bool = False) -> Description:
    errors = (409,) if can_conflict else ()
    return describe(None, answer, error=MessagesError, errors=errors)


@router.post(
    _PATH,
    summary="Create a batch of messages (Anthropic's API)",
    openapi_extra=describe(MessageBatchRequest, MessageBatch, error=MessagesError),
)
async def create_message_batch(request: Request) -> Response:
    """Create a batch from a list of requests, each of which is validated when it runs."""
    body, headers = await read_request(request, MessageBatchRequest)
    state, tenant = state_of(request), caller_of(request).tenant
    _check_requests(state, body.requests)
    now = int(time.time())
    file = await _store_input(state, tenant, body.requests, now)
    batch = StoredBatch(
        id=f"msgbatch_{uuid.uuid4().hex}",
        tenant=tenant,
        endpoint=MESSAGES,
        input_file_id=file.id,
        completion_window=WINDOW,
        created_at=now,
        expires_at=now + WINDOW_S,
        num_lines=len(body.requests),
    )
    await state.batches.create(batch)
    return json_response(_to_message_batch(request, batch), headers)


@router.get(
    _PATH,
    summary="List the batches of messages (Anthropic's API)",
    openapi_extra=_describe(MessageBatchList),
)
async def list_message_batches(
    request: Request,
    before_id: str | None = None,
    after_id: str | None = None,
    limit: Annotated[int, Query(ge=1, le=_MAX_LIST)] = 20,
) -> Response:
    """List the caller's batches, newest first, optionally after or before one of them."""
    if before_id is not None and after_id is not None:
        raise bad_field("before_id", "excludes 'after_id'")
    found = await state_of(request).batches.list(
        caller_of(request).tenant, [MESSAGES], after=after_id, before=before_id, limit=limit + 1
    )
    if found is None:
        name = "after_id" if before_id is None else "before_id"
        raise bad_field(name, "is not the id of a batch")
    page = found[:limit] if before_id is None else found[-limit:]
    data = [_to_message_batch(request, batch) for batch in page]
    return json_response(make_page(MessageBatchList, data, has_more=len(found) > limit))


@router.get(
    _PATH + "/{batch_id}",
    summary="Describe a batch of messages (Anthropic's API)",
    openapi_extra=_describe(MessageBatch),
)
async def retrieve_message_batch(request: Request, batch_id: str) -> Response:
    """Retrieve one of the caller's batches."""
    return json_response(_to_message_batch(request, await _find(request, batch_id)))


@router.post(
    _PATH + "/{batch_id}/cancel",
    summary="Cancel a batch of messages (Anthropic's API)",
    openapi_extra=_describe(MessageBatch, can_conflict=True),
)
async def cancel_message_batch(request: Request, batch_id: str) -> Response:
    """Start no further request. The results hold what was answered until then."""
    batch = await _find(request, batch_id)
    moved = await state_of(request).batches.transition(
        batch.id, ["validating", "in_progress"], "cancelling", cancelling_at=int(time.time())
    )
    if moved is None:
        moved = await _find(request, batch_id)
        if moved.status not in ("cancelling", "cancelled"):
            raise ApiError(409, "The batch has ended, or is about to.", param="batch_id")
    return json_response(_to_message_batch(request, moved))


@router.get(
    _PATH + "/{batch_id}/results",
    summary="The results of a batch of messages (Anthropic's API)",
    openapi_extra=_describe("application/x-jsonl", can_conflict=True),
)
async def retrieve_message_batch_results(request: Request, batch_id: str) -> Response:
    """The results, one line of JSON per request, in no particular order."""
    batch = await _find(request, batch_id)
    if batch.status in ACTIVE_STATUSES:
        raise ApiError(409, "The batch has not ended.", param="batch_id")
    paths = await _result_paths(state_of(request), batch)
    return StreamingResponse(results(paths), media_type="application/x-jsonl")


@router.delete(
    _PATH + "/{batch_id}",
    summary="Delete a batch of messages (Anthropic's API)",
    openapi_extra=_describe(MessageBatchDeleted, can_conflict=True),
)
async def delete_message_batch(request: Request, batch_id: str) -> Response:
    """Delete a batch that has ended, with its requests and results."""
    state, batch = state_of(request), await _find(request, batch_id)
    if batch.status in ACTIVE_STATUSES:
        raise ApiError(409, "The batch has not ended; cancel it first.", param="batch_id")
    for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        file = None if file_id is None else await state.files.get(batch.tenant, file_id)
        if file is not None:
            await state.files.delete(file)
    await state.batches.delete(batch.id)
    return json_response(MessageBatchDeleted(id=batch.id))


def _check_requests(state: ServerState, requests: Sequence[BatchedMessage]) -> None:
    """Reject a batch that would fail as a whole. Raises ApiError (400)."""
    seen: set[str] = set()
    for index, each in enumerate(requests):
        at = f"requests.{index}"
        if each.custom_id in seen:
            raise bad_field(f"{at}.custom_id", "is already used by an earlier request")
        seen.add(each.custom_id)
        model = each.params.get("model")
        if not isinstance(model, str):
            raise bad_field(f"{at}.params.model", "must be a string")
        if model not in state.settings.model_names and model not in state.adapters:
            raise bad_field(
                f"{at}.params.model", f"names {shorten(model, 64)!r}, which is not here"
            )
        if each.params.get("stream"):
            raise bad_field(f"{at}.params.stream", "is not available in a batch")


async def _store_input(
    state: ServerState, tenant: str, requests: Sequence[BatchedMessage], now: int
) -> StoredFile:
    """Store the requests as the input of a batch. Raises StoreError."""
    lines = [
        {"custom_id": r.custom_id, "method": "POST", "url": MESSAGES, "body": r.params}
        for r in requests
    ]
    data = await asyncio.to_thread(lambda: b"\n".join(map(to_json, lines)))
    partial = await state.files.new_partial()
    try:
        await asyncio.to_thread(_write_synced, partial, data)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StoreError(reason_of(error)) from error
    file = StoredFile(
        id=new_file_id(),
        tenant=tenant,
        filename="message_batch.jsonl",
        purpose=_PURPOSE,
        num_bytes=len(data),
        created_at=now,
    )
    await state.files.add(file, partial)
    return file


def _write_synced(path: Path, data: bytes) -> None:
    """Write a file that a row may speak of: it outlives a loss of power."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


async def _result_paths(state: ServerState, batch: StoredBatch) -> list[Path]:
    paths: list[Path] = []
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id is None:
            continue
        file = await state.files.get(batch.tenant, file_id)
        if file is None:
            raise ApiError(404, "The results have been deleted.", param="batch_id")
        paths.append(state.files.path(file))
    return paths


async def _find(request: Request, id: str) -> StoredBatch:
    batch = await state_of(request).batches.get(caller_of(request).tenant, id)
    if batch is None or batch.endpoint != MESSAGES:
        raise ApiError(404, f"There is no batch '{shorten(id, 100)}'.", param="batch_id")
    return batch


def _to_message_batch(request: Request, batch: StoredBatch) -> MessageBatch:
    ended = batch.status not in ACTIVE_STATUSES
    status: Literal["in_progress", "canceling", "ended"] = "ended" if ended else "in_progress"
    ends = (batch.completed_at, batch.failed_at, batch.expired_at, batch.cancelled_at)
    has_results = ended and batch.status != "failed"
    root = public_address(request, state_of(request).settings.trusted_proxies)
    return MessageBatch(
        id=batch.id,
        processing_status="canceling" if batch.status == "cancelling" else status,
        request_counts=_counts(batch),
        created_at=to_rfc3339(batch.created_at),
        expires_at=to_rfc3339(batch.expires_at),
        ended_at=next((to_rfc3339(end) for end in ends if end is not None), None),
        cancel_initiated_at=None
        if batch.cancelling_at is None
        else to_rfc3339(batch.cancelling_at),
        results_url=f"{root}{_PATH}/{batch.id}/results" if has_results else None,
    )


def _counts(batch: StoredBatch) -> MessageBatchCounts:
    if batch.status in ACTIVE_STATUSES:
        return MessageBatchCounts(processing=batch.num_lines)
    if batch.status == "failed":  # the storage failed; there are no results
        return MessageBatchCounts(errored=batch.num_lines)
    left = batch.num_lines - batch.num_completed - batch.num_failed
    counts = MessageBatchCounts(succeeded=batch.num_completed, errored=batch.num_failed)
    if batch.status == "cancelled":
        counts.canceled = left
    else:
        counts.expired = left
    return counts

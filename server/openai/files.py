"""/v1/files: contents that are uploaded once and referenced by id."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from msgspec import Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.access.caller import caller_of
from server.errors import ApiError, bad_field
from server.http.disconnect import until_disconnect
from server.http.multipart import Form, read_form
from server.openai.endpoint import json_response, state_of
from server.openai.openapi_schema import Description, describe
from server.openai.pagination import make_page
from server.openai.unsupported import report_ignored
from server.store.database import StoreError, reason_of
from server.store.files import FileStore, Order, StoredFile, new_file_id

router = APIRouter()

UPLOAD_PATH = "/v1/files"
MAX_FORM_BYTES = 2**20  # of an upload without the file itself
_PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
_MIN_LIFE_S, _MAX_LIFE_S = 3600, 30 * 24 * 3600
_MAX_LIST = 10_000
_READ_BYTES = 256 * 2**10
_FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})


class FileObject(Struct, kw_only=True):
    """A file's description."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(Struct, kw_only=True):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Struct, kw_only=True):
    """The response to a deletion."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


def _describe_upload() -> Description:
    """Describe the form, which is read here and not by FastAPI."""
    description = describe(None, FileObject)
    form = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {
            "file": {"type": "string", "format": "binary"},
            "purpose": {"type": "string", "enum": list(_PURPOSES)},
            "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
            "expires_after[seconds]": {
                "type": "integer",
                "minimum": _MIN_LIFE_S,
                "maximum": _MAX_LIFE_S,
            },
        },
    }
    content = {"multipart/form-data": {"schema": form}}
    description["requestBody"] = {"required": True, "content": content}
    return description


@router.post(UPLOAD_PATH, summary="Upload a file", openapi_extra=_describe_upload())
async def create_file(request: Request) -> Response:
    """Store a file, streamed to disk as it arrives."""
    file, headers = await receive_upload(request, _FIELDS, _purpose_and_life)
    return json_response(_to_file_object(file), headers)


@router.get("/v1/files", summary="List the files", openapi_extra=describe(None, FileList))
async def list_files(
    request: Request,
    purpose: str | None = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=_MAX_LIST)] = _MAX_LIST,
    order: Order = "desc",
) -> Response:
    """List the caller's files, by default newest first."""
    store, tenant = state_of(request).files, caller_of(request).tenant
    found = await store.list(tenant, purpose=purpose, after=after, limit=limit + 1, order=order)
    if found is None:
        raise bad_field("after", "is not the id of a file")
    data = [_to_file_object(file) for file in found[:limit]]
    return json_response(make_page(FileList, data, has_more=len(found) > limit))


@router.get(
    "/v1/files/{file_id}", summary="Describe a file", openapi_extra=describe(None, FileObject)
)
async def retrieve_file(request: Request, file_id: str) -> Response:
    """Retrieve one of the caller's files."""
    return json_response(
        _to_file_object(await find_file(state_of(request).files, request, file_id))
    )


@router.get(
    "/v1/files/{file_id}/content",
    summary="The contents of a file",
    openapi_extra=describe(None, "application/octet-stream"),
)
async def retrieve_file_content(request: Request, file_id: str) -> Response:
    """The contents of one of the caller's files, as uploaded or generated."""
    store = state_of(request).files
    file = await find_file(store, request, file_id)
    return _FileContentResponse(store.path(file), file.num_bytes)


@router.delete(
    "/v1/files/{file_id}",
    summary="Delete a file",
    openapi_extra=describe(None, FileDeleted, errors=(409,)),
)
async def delete_file(request: Request, file_id: str) -> Response:
    """Delete one of the caller's files, unless a batch still reads it."""
    return json_response(FileDeleted(id=(await delete_upload(request, file_id)).id))


async def find_file(store: FileStore, request: Request, id: str) -> StoredFile:
    """One of the caller's files. Raises ApiError (404)."""
    file = await store.get(caller_of(request).tenant, id)
    if file is None:
        message = f"There is no file '{id[:100]}'."
        raise ApiError(404, message, param="file_id", code="file_not_found")
    return file


async def receive_upload(
    request: Request,
    fields: Collection[str],
    purpose_and_life: Callable[[Form], tuple[str, int | None]],
) -> tuple[StoredFile, dict[str, str]]:
    """Store the file of a form, and return the header that names ignored fields, too.

    Args:
        request: its body is read here.
        fields: those that are read besides the file.
        purpose_and_life: of the file, in seconds or None; may raise ApiError (400).

    Raises:
        ApiError: the form is not valid, or too large.
        ClientDisconnected: the connection closed before the body was complete.
        StoreError: the file could not be stored.
    """
    state = state_of(request)
    partial = await state.files.new_partial()
    try:
        form = await _receive_form(request, partial, state.settings.max_file_bytes)
        ignored = sorted(set(form.fields) - set(fields))
        headers = report_ignored(ignored, strict=state.settings.strict)
        if form.filename is None:
            raise bad_field("file", "is required")
        purpose, life_s = purpose_and_life(form)
        now = int(time.time())
        file = StoredFile(
            id=new_file_id(),
            tenant=caller_of(request).tenant,
            filename=form.filename,
            purpose=purpose,
            num_bytes=form.num_bytes,
            created_at=now,
            expires_at=None if life_s is None else now + life_s,
        )
        await state.files.add(file, partial)
    finally:
        partial.unlink(missing_ok=True)
    return file, headers


async def delete_upload(request: Request, id: str) -> StoredFile:
    """Delete one of the caller's files.

    Raises:
        ApiError: there is no such file (404), or a batch still reads it (409).
        StoreError: it could not be deleted.
    """
    state = state_of(request)
    file = await find_file(state.files, request, id)
    batch_id = await state.batches.find_batch_using(file.id)
    if batch_id is not None:
        message = f"The file is the input of batch '{batch_id}', which has not ended."
        raise ApiError(409, message, param="file_id", code="file_in_use")
    await state.files.delete(file)
    return file


async def _receive_form(request: Request, path: Path, max_bytes: int) -> Form:
    try:
        return await read_form(request, "file", path, max_bytes)
    except OSError as error:
        raise StoreError(reason_of(error)) from error


def _purpose_and_life(form: Form) -> tuple[str, int | None]:
    purpose = form.fields.get("purpose")
    if purpose not in _PURPOSES:
        raise bad_field("purpose", f"must be one of {', '.join(_PURPOSES)}")
    return purpose, _lifetime_s(form.fields)


def _lifetime_s(fields: Mapping[str, str]) -> int | None:
    anchor = fields.get("expires_after[anchor]")
    seconds = fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise bad_field("expires_after.anchor", "must be 'created_at'")
    return read_lifetime_s(seconds, "expires_after.seconds")


def read_lifetime_s(given: str | None, param: str, longest_s: int = _MAX_LIFE_S) -> int:
    """The lifetime of a file as a form has it. Raises ApiError (400)."""
    if given is None or not given.isascii() or not given.isdigit() or len(given) > 9:
        raise bad_field(param, "must be a number of seconds")
    return check_lifetime_s(int(given), param, longest_s)


def check_lifetime_s(seconds: int, param: str, longest_s: int = _MAX_LIFE_S) -> int:
    """Return ``seconds`` if it is a valid lifetime of a file. Raises ApiError (400)."""
    if not _MIN_LIFE_S <= seconds <= longest_s:
        raise bad_field(param, f"must be between {_MIN_LIFE_S} and {longest_s}")
    return seconds


def _to_file_object(file: StoredFile) -> FileObject:
    return FileObject(
        id=file.id,
        bytes=file.num_bytes,
        created_at=file.created_at,
        expires_at=file.expires_at,
        filename=file.filename,
        purpose=file.purpose,
    )


class _FileContentResponse(Response):
    """A file's contents, read on a thread and no faster than the client receives them."""

    media_type = "application/octet-stream"

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"content-length": str(num_bytes)})
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file. Raises ClientDisconnected, and StoreError before the first byte."""
        try:
            file = await asyncio.to_thread(self._path.open, "rb")
        except OSError as error:
            raise StoreError(reason_of(error)) from error
        with file:
            head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(head)
            async with until_disconnect(receive):
                while data := await asyncio.to_thread(file.read, _READ_BYTES):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

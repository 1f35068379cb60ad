"""/v1/files for Anthropic's clients, which name the version of its API in a header.

The files are those of ``server/openai/files.py``, whose paths these are too; only the shapes and
the fields of an upload are others.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.routing import APIRoute
from msgspec import Struct
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from server.access.caller import caller_of
from server.anthropic.errors import FILES, is_anthropic
from server.anthropic.outputs import to_rfc3339
from server.errors import bad_field
from server.http.multipart import Form
from server.openai.endpoint import json_response, state_of
from server.openai.files import delete_upload, find_file, read_lifetime_s, receive_upload
from server.openai.pagination import make_page
from server.store.files import FileStore, StoredFile

_PURPOSE = "user_data"  # as OpenAI's clients see these files
_MAX_LIFE_S = 90 * 24 * 3600
_MAX_LIST = 1000
_MAX_IDS = 100
_PAGE = "page_"
_LIFE = "expires_in_seconds"


class _AnthropicRoute(APIRoute):
    """A route for requests of Anthropic's clients; others find the next one of the same path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See ``starlette.routing.Route``."""
        return super().matches(scope) if is_anthropic(scope) else (Match.NONE, {})


# Not in the schema, which has one description per path: OpenAI's.
router = APIRouter(route_class=_AnthropicRoute, include_in_schema=False)


class FileMetadata(Struct, kw_only=True):
    """A file's description. Times are in RFC 3339 format."""

    id: str
    type: Literal["file"] = "file"
    filename: str
    mime_type: str
    size_bytes: int
    created_at: str
    expires_at: str | None
    downloadable: bool = True


class FileMetadataList(Struct, kw_only=True):
    """A page of files, by the ids of its ends or by a cursor."""

    data: list[FileMetadata]
    has_more: bool
    first_id: str | None
    last_id: str | None
    next_page: str | None = None


class DeletedFile(Struct, kw_only=True):
    """The response to a deletion."""

    id: str
    type: Literal["file_deleted"] = "file_deleted"


@router.post(FILES, summary="Upload a file (Anthropic's API)")
async def upload_file(request: Request) -> Response:
    """Store a file, streamed to disk as it arrives."""
    file, headers = await receive_upload(request, {_LIFE}, lambda form: (_PURPOSE, _life_s(form)))
    return json_response(_to_metadata(file), headers)


@router.get(FILES, summary="List the files (Anthropic's API)")
async def list_file_metadata(
    request: Request,
    ids: Annotated[list[str] | None, Query(alias="ids[]", max_length=_MAX_IDS)] = None,
    page: str | None = None,
    after_id: str | None = None,
    before_id: str | None = None,
    scope_id: str | None = None,
    limit: Annotated[int, Query(ge=1, le=_MAX_LIST)] = 20,
) -> Response:
    """List the caller's files, newest first, or those of some ids."""
    store, tenant = state_of(request).files, caller_of(request).tenant
    if scope_id is not None:
        raise bad_field("scope_id", "is not supported: files have no scopes here")
    if ids is not None:
        named = [await store.get(tenant, id) for id in dict.fromkeys(ids)]
        return _list([file for file in named if file is not None], has_more=False)
    if sum(each is not None for each in (page, after_id, before_id)) > 1:
        raise bad_field("page", "excludes 'after_id' and 'before_id', which exclude each other")
    if before_id is not None:
        older = await _page(store, tenant, "before_id", before_id, limit, newer=True)
        return _list(older[:limit][::-1], has_more=len(older) > limit)
    field, after = ("page", page) if page is not None else ("after_id", after_id)
    found = await _page(
        store, tenant, field, None if after is None else after.removeprefix(_PAGE), limit
    )
    return _list(found[:limit], has_more=len(found) > limit)


@router.get(FILES + "/{file_id}", summary="Describe a file (Anthropic's API)")
async def retrieve_file_metadata(request: Request, file_id: str) -> Response:
    """Retrieve one of the caller's files."""
    return json_response(_to_metadata(await find_file(state_of(request).files, request, file_id)))


@router.delete(FILES + "/{file_id}", summary="Delete a file (Anthropic's API)")
async def delete_file(request: Request, file_id: str) -> Response:
    """Delete one of the caller's files, unless a batch still reads it."""
    return json_response(DeletedFile(id=(await delete_upload(request, file_id)).id))


async def _page(
    store: FileStore,
    tenant: str,
    field: str,
    beyond: str | None,
    limit: int,
    *,
    newer: bool = False,
) -> list[StoredFile]:
    """Up to one file more than ``limit``, those next to the file ``beyond`` first."""
    order = "asc" if newer else "desc"
    found = await store.list(tenant, purpose=None, after=beyond, limit=limit + 1, order=order)
    if found is None:
        raise bad_field(field, "is not the id of a file")
    return found


def _list(files: Sequence[StoredFile], *, has_more: bool) -> Response:
    listed = make_page(FileMetadataList, [*map(_to_metadata, files)], has_more=has_more)
    if has_more:
        listed.next_page = f"{_PAGE}{listed.last_id}"
    return json_response(listed)


def _life_s(form: Form) -> int | None:
    given = form.fields.get(_LIFE)
    return None if given is None else read_lifetime_s(given, _LIFE, _MAX_LIFE_S)


def _to_metadata(file: StoredFile) -> FileMetadata:
    return FileMetadata(
        id=file.id,
        filename=file.filename,
        mime_type=mimetypes.guess_type(file.filename)[0] or "application/octet-stream",
        size_bytes=file.num_bytes,
        created_at=to_rfc3339(file.created_at),
        expires_at=None if file.expires_at is None else to_rfc3339(file.expires_at),
    )

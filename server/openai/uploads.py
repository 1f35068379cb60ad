"""The contents of a caller's uploaded files, by the ids that requests name."""

from __future__ import annotations

import asyncio
import base64
import mimetypes
from pathlib import Path

from server.access.caller import Caller
from server.errors import ApiError, bad_field, shorten
from server.openai.documents import text_of_file
from server.store.database import StoreError, reason_of
from server.store.files import FileStore, StoredFile

_MAX_BYTES = 16 * 2**20


async def find_upload(files: FileStore, caller: Caller, id: str, where: str) -> StoredFile:
    """A file that is part of a request.

    Raises:
        ApiError: 400 that names ``where``, a part of the request, if the caller has no such file or
            it is too large.
        StoreError: it cannot be looked up.
    """
    file = await files.get(caller.tenant, id)
    if file is None:
        raise upload_error(where, id, "is not stored here")
    if file.num_bytes > _MAX_BYTES:
        raise upload_error(where, id, f"is larger than {_MAX_BYTES >> 20} MiB")
    return file


async def read_text(
    files: FileStore, caller: Caller, id: str, where: str
) -> tuple[StoredFile, str]:
    """A file and its text. Raises as ``find_upload``, also for a file that is no text."""
    file = await find_upload(files, caller, id, where)
    try:
        return file, text_of_file(await _contents(files, file))
    except ValueError as problem:
        raise upload_error(where, id, str(problem)) from None


async def read_image(files: FileStore, caller: Caller, id: str, where: str) -> tuple[str, str]:
    """An image's media type and its contents in base64.

    Raises as ``find_upload``, also for a file whose name is not that of an image.
    """
    file = await find_upload(files, caller, id, where)
    kind = mimetypes.guess_type(file.filename)[0] or ""
    if not kind.startswith("image/"):
        raise upload_error(where, id, "is no image, by its name")
    return kind, base64.b64encode(await _contents(files, file)).decode("ascii")


def upload_error(where: str, id: str, problem: str) -> ApiError:
    """The error about a file that cannot be used."""
    return bad_field(where, f"names the file {shorten(id, 80)!r}, which {problem}")


async def _contents(files: FileStore, file: StoredFile) -> bytes:
    return await asyncio.to_thread(_read, files.path(file))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(reason_of(error)) from error

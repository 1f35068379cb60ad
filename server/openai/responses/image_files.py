"""Images by file id: the file's contents replace the id in an item."""

from __future__ import annotations

import asyncio
import base64
import mimetypes
from pathlib import Path

from server.access.caller import Caller
from server.errors import ApiError, bad_field, shorten
from server.openai.responses.items import CallOutputItem, InputImage, Item, MessageItem
from server.store.database import StoreError
from server.store.files import FileStore

_MAX_BYTES = 16 * 2**20


async def inline_image_files(files: FileStore, caller: Caller, item: Item, where: str) -> None:
    """Replace file ids in an item's images by the contents of the files.

    The item is stored with the contents, so later turns do not depend on the file.

    Raises:
        ApiError: 400 that names the part of the request, if the caller has no such file.
        StoreError: the file cannot be read.
    """
    for image in _images_of(item):
        if image.file_id is not None and not image.image_url:
            image.image_url = await _read(files, caller, image.file_id, where)


def _images_of(item: Item) -> list[InputImage]:
    if isinstance(item, MessageItem):
        return [part for part in item.content if isinstance(part, InputImage)]
    if isinstance(item, CallOutputItem) and not isinstance(item.output, str):
        return [part for part in item.output if isinstance(part, InputImage)]
    return []


async def _read(files: FileStore, caller: Caller, id: str, where: str) -> str:
    file = await files.get(caller.tenant, id)
    if file is None:
        raise _file_error(where, id, "is not stored here")
    if file.num_bytes > _MAX_BYTES:
        raise _file_error(where, id, f"is larger than {_MAX_BYTES >> 20} MiB")
    kind = mimetypes.guess_type(file.filename)[0] or ""
    if not kind.startswith("image/"):
        raise _file_error(where, id, "is no image, by its name")
    return await asyncio.to_thread(_to_data_url, files.path(file), kind)


def _to_data_url(path: Path, kind: str) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(error.strerror or str(error)) from error
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


def _file_error(where: str, id: str, problem: str) -> ApiError:
    return bad_field(where, f"names the file {shorten(id, 80)!r}, which {problem}")

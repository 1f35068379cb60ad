"""Images and texts by file id: the file's contents go into the item that names it.

The item is stored with the contents, so later turns do not depend on the file.
"""

from __future__ import annotations

import base64
import mimetypes

from server.access.caller import Caller
from server.openai.documents import text_of_file
from server.openai.responses.items import CallOutputItem, InputFile, InputImage, Item, MessageItem
from server.openai.uploads import find_upload, read_upload, upload_error
from server.store.files import FileStore


async def inline_files(files: FileStore, caller: Caller, item: Item, where: str) -> None:
    """Read the uploaded files that an item's images and files are.

    Raises:
        ApiError: 400 that names the part of the request, if the caller has no such file, or it is
            of another kind.
        StoreError: the file cannot be read.
    """
    for part in _parts_of(item):
        if isinstance(part, InputImage) and part.file_id is not None and not part.image_url:
            await _read_image(files, caller, part, part.file_id, where)
        elif isinstance(part, InputFile) and part.file_id is not None and not part.file_data:
            await _read_text(files, caller, part, part.file_id, where)


def _parts_of(item: Item) -> list[object]:
    if isinstance(item, MessageItem):
        return [*item.content]
    if isinstance(item, CallOutputItem) and not isinstance(item.output, str):
        return [*item.output]
    return []


async def _read_image(
    files: FileStore, caller: Caller, image: InputImage, id: str, where: str
) -> None:
    file = await find_upload(files, caller, id, where)
    kind = mimetypes.guess_type(file.filename)[0] or ""
    if not kind.startswith("image/"):
        raise upload_error(where, id, "is no image, by its name")
    image.image_url = _to_data_url(await read_upload(files, file), kind)


async def _read_text(
    files: FileStore, caller: Caller, given: InputFile, id: str, where: str
) -> None:
    file = await find_upload(files, caller, id, where)
    contents = await read_upload(files, file)
    try:
        text_of_file(contents)
    except ValueError as problem:
        raise upload_error(where, id, str(problem)) from None
    given.file_data = _to_data_url(contents, "text/plain")
    given.filename = given.filename or file.filename


def _to_data_url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"

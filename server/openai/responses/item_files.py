"""Images and texts by file id: the file's contents go into the item that names it.

The item is stored with the contents, so later turns do not depend on the file.
"""

from __future__ import annotations

import base64

from server.access.caller import Caller
from server.openai.responses.items import CallOutputItem, InputFile, InputImage, Item, MessageItem
from server.openai.uploads import read_image, read_text
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
            kind, data = await read_image(files, caller, part.file_id, where)
            part.image_url = f"data:{kind};base64,{data}"
        elif isinstance(part, InputFile) and part.file_id is not None and not part.file_data:
            file, text = await read_text(files, caller, part.file_id, where)
            data = base64.b64encode(text.encode()).decode("ascii")
            part.file_data = f"data:text/plain;base64,{data}"
            part.filename = part.filename or file.filename


def _parts_of(item: Item) -> list[object]:
    if isinstance(item, MessageItem):
        return [*item.content]
    if isinstance(item, CallOutputItem) and not isinstance(item.output, str):
        return [*item.output]
    return []

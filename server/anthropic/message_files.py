"""Uploaded files in messages: their contents take the places of their ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from server.access.caller import Caller
from server.anthropic.content import (
    Block,
    DocumentBlock,
    FileDocumentBlock,
    FileImageBlock,
    ImageBlock,
    TextBlock,
    ToolResultBlock,
)
from server.anthropic.inputs import InputMessage, TokenCountRequest
from server.openai.uploads import read_image, read_text
from server.store.files import FileStore

_RequestT = TypeVar("_RequestT", bound=TokenCountRequest)


async def with_file_contents(files: FileStore, caller: Caller, request: _RequestT) -> _RequestT:
    """A request in which no block refers to a file.

    Raises:
        ApiError: 400 that names the message, if the caller has no such file or it is of another
            kind.
        StoreError: a file cannot be read.
    """
    if not any(_has_files(message.content) for message in request.messages):
        return request
    messages: list[InputMessage] = []
    for index, message in enumerate(request.messages):
        where = f"messages.{index}.content"
        content = [await _read(files, caller, block, where) for block in message.content]
        messages.append(message.model_copy(update={"content": content}))
    return request.model_copy(update={"messages": messages})


def _has_files(blocks: Sequence[Block]) -> bool:
    return any(
        isinstance(block, (FileImageBlock, FileDocumentBlock))
        or (isinstance(block, (DocumentBlock, ToolResultBlock)) and _has_files(block.content))
        for block in blocks
    )


async def _read(files: FileStore, caller: Caller, block: Block, where: str) -> Block:
    match block:
        case FileImageBlock(id):
            return ImageBlock(*await read_image(files, caller, id, where))
        case FileDocumentBlock(id, title, context):
            file, text = await read_text(files, caller, id, where)
            return DocumentBlock([TextBlock(text)], title or file.filename, context)
        case DocumentBlock() | ToolResultBlock():
            content = [await _read(files, caller, each, where) for each in block.content]
            return msgspec.structs.replace(block, content=content)
    return block

"""Uploaded files in the messages of a chat: their texts take the places of their ids."""

from __future__ import annotations

from typing import TypeVar

from server.access.caller import Caller
from server.openai.content import join_texts, parts_of
from server.openai.documents import FileReference, show_document
from server.openai.inputs import ChatRequest, TokenizeRequest
from server.openai.messages import Message
from server.openai.uploads import read_text
from server.store.files import FileStore

_BodyT = TypeVar("_BodyT", ChatRequest, TokenizeRequest)


async def with_file_texts(files: FileStore, caller: Caller, body: _BodyT) -> _BodyT:
    """A request in which no message refers to a file.

    Raises:
        ApiError: 400 that names the message, if the caller has no such file or it is no text.
        StoreError: a file cannot be read.
    """
    messages = body.messages or []
    parts = (part for message in messages for part in parts_of(message.content))
    if not any(isinstance(part, FileReference) for part in parts):
        return body
    read = [
        await _with_texts(files, caller, message, f"messages.{index}.content")
        for index, message in enumerate(messages)
    ]
    return body.model_copy(update={"messages": read})


async def _with_texts(files: FileStore, caller: Caller, message: Message, where: str) -> Message:
    parts = list(parts_of(message.content))
    for place, part in enumerate(parts):
        if isinstance(part, FileReference):
            file, text = await read_text(files, caller, part.id, where)
            parts[place] = show_document(text, part.name or file.filename)
    return message.model_copy(update={"content": join_texts(parts)}) if parts else message

"""The blocks of messages: text, images, documents, search results, thinking, and calls of tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from server.errors import shorten
from server.openai.documents import decode_file, text_of_file
from server.openai.unread_fields import always, by_type, read_fields_of

_MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    """Text."""

    text: str


class ImageBlock(msgspec.Struct, frozen=True, tag="image"):
    """An image."""

    media_type: str
    data: str  # base64


class FileImageBlock(msgspec.Struct, frozen=True, tag="image"):
    """An uploaded image, until it is read."""

    file_id: str


class FileDocumentBlock(msgspec.Struct, frozen=True, tag="document"):
    """An uploaded document, until it is read."""

    file_id: str
    title: str | None
    context: str | None


class DocumentBlock(msgspec.Struct, frozen=True, tag="document"):
    """A document, or a search result, of text and perhaps images."""

    content: list[TextBlock | ImageBlock | FileImageBlock]
    title: str | None
    context: str | None = None  # about the document, for the model
    source: str | None = None  # where it was found


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking"):
    """The thinking of an earlier answer."""

    thinking: str


class RedactedThinkingBlock(msgspec.Struct, frozen=True, tag="redacted_thinking"):
    """The thinking of another model, which only its maker can read; it is left out."""


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use"):
    """An earlier tool call."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, frozen=True, tag="tool_result"):
    """The result of a tool call."""

    tool_use_id: str
    content: list[ResultBlock]
    is_error: bool


ResultBlock = TextBlock | ImageBlock | FileImageBlock | DocumentBlock | FileDocumentBlock


_TEXT = read_fields_of(("type", "text"))
_IMAGE = read_fields_of(
    ("type", "source"), source=always(read_fields_of(("type", "media_type", "data", "file_id")))
)
_DOCUMENT = read_fields_of(
    ("type", "source", "title", "context"),
    source=always(
        read_fields_of(
            ("type", "media_type", "data", "content", "file_id"),
            content=by_type({"text": _TEXT, "image": _IMAGE}),
        )
    ),
)
_SEARCH_RESULT = read_fields_of(
    ("type", "source", "title", "content"), content=by_type({"text": _TEXT})
)
# Arguments of calls are the tool's own.
_kind_of_block = by_type(
    {
        "text": _TEXT,
        "image": _IMAGE,
        "document": _DOCUMENT,
        "search_result": _SEARCH_RESULT,
        # A signature proves where thinking comes from, and none is asked for.
        "thinking": read_fields_of(("type", "thinking", "signature")),
        "redacted_thinking": read_fields_of(("type",)),
        "tool_use": read_fields_of(("type", "id", "name", "input")),
        "tool_result": read_fields_of(
            ("type", "tool_use_id", "content", "is_error"),
            content=by_type(
                {
                    "text": _TEXT,
                    "image": _IMAGE,
                    "document": _DOCUMENT,
                    "search_result": _SEARCH_RESULT,
                }
            ),
        ),
    }
)
kind_of_message = always(read_fields_of(("role", "content"), content=_kind_of_block))
kind_of_system = by_type({"text": _TEXT})

Block = ResultBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


def read_content(value: Any) -> list[Block]:
    """The blocks of a message. Raises ValueError that names the invalid block."""
    if isinstance(value, str):
        return [TextBlock(value)]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of blocks")
    return [_read_block(block, index) for index, block in enumerate(value)]


def read_text(value: Any) -> str:
    """A text, or several text blocks, as in ``system``. Raises ValueError."""
    texts: list[str] = []
    for block in read_content(value):
        if not isinstance(block, TextBlock):
            raise ValueError("must be a string or a list of text blocks")
        texts.append(block.text)
    return "\n".join(texts)


def _read_block(block: Any, index: int) -> Block:
    if not isinstance(block, dict):
        raise ValueError(f"block {index} must be an object")
    match block.get("type"):
        case "text":
            return TextBlock(_string(block, "text", index))
        case "thinking":
            return ThinkingBlock(_string(block, "thinking", index))
        case "redacted_thinking":
            return RedactedThinkingBlock()
        case "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise ValueError(f"block {index} must have an 'input' that is an object")
            return ToolUseBlock(
                _string(block, "id", index), _string(block, "name", index), arguments
            )
        case "tool_result":
            content = _read_result(block.get("content") or "", index)
            is_error = block.get("is_error") or False
            return ToolResultBlock(_string(block, "tool_use_id", index), content, is_error is True)
        case "image":
            return _read_image(block.get("source"), index)
        case "document":
            try:
                return _read_document(block)
            except ValueError as error:
                raise ValueError(f"block {index} of type 'document' {error}") from None
        case "search_result":
            return _read_search_result(block, index)
        case kind:
            raise ValueError(f"block {index} of type {shorten(str(kind), 40)!r} is not supported")


def _read_result(value: Any, index: int) -> list[ResultBlock]:
    content: list[ResultBlock] = []
    try:
        for block in read_content(value):
            if not isinstance(block, ResultBlock):
                kinds = "text, image, document and search result blocks"
                raise ValueError(f"must be a string or a list of {kinds}")
            content.append(block)
    except ValueError as error:
        raise ValueError(f"block {index}: its content {error}") from None
    return content


def _read_document(block: Mapping[str, Any]) -> DocumentBlock | FileDocumentBlock:
    """Parse a document. Raises ValueError, which follows the block's name."""
    title, context, source = (block.get(name) for name in ("title", "context", "source"))
    for name, value in (("title", title), ("context", context)):
        if not isinstance(value, str | None):
            raise ValueError(f"must have a {name!r} that is a string")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("text", "base64", "content", "file"):
        kinds = "'text', 'base64', 'content' or 'file'"
        raise ValueError(f"must have a 'source' of type {kinds}; nothing is fetched")
    if kind == "file":
        return FileDocumentBlock(_file_id(source), title, context)
    if kind == "content":
        try:
            return DocumentBlock(_read_parts(source.get("content")), title, context)
        except ValueError as error:
            raise ValueError(f"has a source whose content {error}") from None
    media_type, data = source.get("media_type"), source.get("data")
    if media_type != "text/plain":
        shown = shorten(str(media_type), 40)
        raise ValueError(f"is of the media type {shown!r}; only 'text/plain' is read here")
    if not isinstance(data, str):
        raise ValueError("must have 'data' that is a string")
    text = data
    if kind == "base64":
        try:
            text = text_of_file(decode_file(data))
        except ValueError as error:
            raise ValueError(f"has 'data' that {error}") from None
    return DocumentBlock([TextBlock(text)], title, context)


def _read_search_result(block: Mapping[str, Any], index: int) -> DocumentBlock:
    title, source = (_string(block, name, index) for name in ("title", "source"))
    try:
        text = read_text(block.get("content"))
    except ValueError as error:
        raise ValueError(f"block {index} of type 'search_result': its content {error}") from None
    return DocumentBlock([TextBlock(text)], title, source=source)


def _read_parts(value: Any) -> list[TextBlock | ImageBlock | FileImageBlock]:
    content: list[TextBlock | ImageBlock | FileImageBlock] = []
    for block in read_content(value):
        if not isinstance(block, (TextBlock, ImageBlock, FileImageBlock)):
            raise ValueError("must hold text and images alone")
        content.append(block)
    return content


def _read_image(source: Any, index: int) -> ImageBlock | FileImageBlock:
    if not isinstance(source, dict) or source.get("type") not in ("base64", "file"):
        problem = "must have a 'source' of type 'base64' or 'file'; nothing is fetched"
        raise ValueError(f"block {index} of type 'image' {problem}")
    if source["type"] == "file":
        try:
            return FileImageBlock(_file_id(source))
        except ValueError as error:
            raise ValueError(f"block {index} of type 'image' {error}") from None
    media_type, data = source.get("media_type"), source.get("data")
    if media_type not in _MEDIA_TYPES:
        problem = f"must have a 'media_type' of {', '.join(_MEDIA_TYPES)}"
        raise ValueError(f"block {index} of type 'image' {problem}")
    if not isinstance(data, str):
        raise ValueError(f"block {index} of type 'image' must have 'data' that is a string")
    return ImageBlock(media_type, data)


def _file_id(source: Mapping[str, Any]) -> str:
    """The id that a source names. Raises ValueError, which follows the block's name."""
    id = source.get("file_id")
    if not isinstance(id, str) or not id:
        raise ValueError("must have a source whose 'file_id' is the id of an uploaded file")
    return id


def _string(block: Mapping[str, Any], name: str, index: int) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ValueError(f"block {index} must have a {name!r} that is a string")
    return value

"""Documents: texts that a message holds beside its own, as files or as blocks.

The model sees one as text, between tags that say where it begins and ends and what it is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from engine.errors import InvalidParameter
from engine.images.base64 import decode_base64

END = "</document>"


class FileReference(Struct, frozen=True):
    """An uploaded file in a message, until its text is read."""

    id: str
    name: str | None = None  # as the message calls it


def begin_document(
    title: str | None = None, context: str | None = None, source: str | None = None
) -> str:
    """What the model sees before a document's text; ``END`` follows it, each on its own line."""
    told = {"title": title, "source": source, "context": context}
    lines = [f"<{name}>{value}</{name}>" for name, value in told.items() if value]
    return "\n".join(("<document>", *lines))


def show_document(
    text: str, title: str | None = None, context: str | None = None, source: str | None = None
) -> str:
    """A whole document as the model sees it."""
    return "\n".join((begin_document(title, context, source), text.removesuffix("\n"), END))


def text_of_file(data: bytes) -> str:
    """The text of a file. Raises ValueError, which follows the file's name, if it is none."""
    if data.startswith(b"%PDF-"):
        raise ValueError("is a PDF: send its text, since nothing else is read here")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError("is not a text in UTF-8; no other files are read here")
    return text


def decode_file(file_data: str) -> bytes:
    """The contents of a file in base64, alone or as a ``data:`` URL.

    Raises ValueError, which follows the field's name.
    """
    head, comma, body = file_data.partition(",")
    if head[:5].lower() == "data:":
        if not comma or not head.lower().endswith(";base64"):
            raise ValueError("must be in base64, as in data:text/plain;base64,...")
    else:
        body = file_data
    try:
        return decode_base64(body)
    except InvalidParameter:
        raise ValueError("must hold the file in base64; nothing is fetched") from None


def read_file(file: Mapping[str, Any]) -> str | FileReference:
    """A file part's ``filename``, and its ``file_data`` or ``file_id``: shown, or to be read.

    Of both, as stored items have them, the data counts.

    Raises ValueError that names the field.
    """
    name, data, id = (file.get(field) for field in ("filename", "file_data", "file_id"))
    if not isinstance(name, str | None):
        raise ValueError("its 'filename' must be a string")
    if file.get("file_url") is not None:
        raise ValueError("its 'file_url' is not taken: nothing is fetched; send 'file_data'")
    if id is not None and not (isinstance(id, str) and id):
        raise ValueError("its 'file_id' must be the id of an uploaded file")
    if data is None:
        if id is None:
            raise ValueError("it needs 'file_data' or 'file_id'")
        return FileReference(id, name)
    if not isinstance(data, str):
        raise ValueError("its 'file_data' must be a string")
    try:
        contents = decode_file(data)
    except ValueError as problem:
        raise ValueError(f"its 'file_data' {problem}") from None
    try:
        return show_document(text_of_file(contents), name)
    except ValueError as problem:
        raise ValueError(f"its file {problem}") from None

"""A multipart/form-data body with one file, streamed to disk as it arrives.

The body is never held in memory: the file is written in pieces of a megabyte, on a thread. Other
fields are few and short.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fastapi import Request
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from server.errors import ApiError, bad_field
from server.http.disconnect import ClientDisconnected

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_WRITE_BYTES = 2**20
_MAX_FIELDS = 32
_MAX_FIELD_BYTES = 64 * 2**10
_MAX_FILENAME = 255
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")


class Form:
    """What a form holds besides its file's contents."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # None: no file was sent
        self.num_bytes = 0  # of the file


async def read_form(request: Request, file_field: str, path: Path, max_bytes: int) -> Form:
    """Read a form whose field ``file_field`` is a file, and write that to ``path``, synced.

    Raises:
        ApiError: not a form (415), a malformed one (400), or a file over ``max_bytes`` (413).
        ClientDisconnected: the connection closed before the body was complete.
        OSError: the file could not be written.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise ApiError(415, "Only multipart/form-data is read here.")
    with path.open("wb") as file:
        reader = _Reader(boundary, file_field, file, max_bytes)
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            await reader.feed(message.get("body", b""))
            if not message.get("more_body", False):
                return await reader.end()


class _Reader:
    """The parser's callbacks and their state."""

    def __init__(self, boundary: bytes, file_field: str, file: BinaryIO, max_bytes: int) -> None:
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin,
            "on_part_data": self._data,
            "on_part_end": self._end_part,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)
        except MultipartParseError as error:
            raise _malformed(str(error)) from None
        self._file_field = file_field
        self._file = file
        self._max_bytes = max_bytes
        self._form = Form()
        self._complete = False
        self._name = ""  # of the part being parsed
        self._is_file = False
        self._value = bytearray()
        self._header = [bytearray(), bytearray()]
        self._disposition = b""
        self._unwritten: list[bytes] = []
        self._num_unwritten = 0

    async def feed(self, data: bytes) -> None:
        """Parse the next bytes of the body."""
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise _malformed(str(error)) from None
        if self._num_unwritten >= _WRITE_BYTES:
            await self._write()

    async def end(self) -> Form:
        """The form, once the body is complete and the file is on disk."""
        if not self._complete:
            raise _malformed("it ends too early")
        await self._write()
        await asyncio.to_thread(self._sync)
        return self._form

    async def _write(self) -> None:
        pieces, self._unwritten, self._num_unwritten = self._unwritten, [], 0
        await asyncio.to_thread(self._file.write, b"".join(pieces))

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    # ------------------------------------------------------------ callbacks

    def _begin(self) -> None:
        self._name, self._is_file, self._disposition = "", False, b""
        self._value.clear()
        if len(self._form.fields) >= _MAX_FIELDS:
            raise _malformed("it has too many fields")

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header[0] += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1] += data[start:end]

    def _end_header(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = bytes(value)
        self._header = [bytearray(), bytearray()]

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self._disposition)
        name = options.get(b"name")
        if kind != b"form-data" or name is None:
            raise _malformed("a part has no name")
        self._name = name.decode("utf-8", "replace")
        self._is_file = self._name == self._file_field
        if self._is_file:
            if self._form.filename is not None:
                raise bad_field(self._file_field, "must be one file")
            given = options.get(b"filename", b"").decode("utf-8", "replace")
            self._form.filename = _safe_filename(given)

    def _data(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            self._value += data[start:end]
            if len(self._value) > _MAX_FIELD_BYTES:
                raise bad_field(self._name[:64], "is too long")
            return
        self._form.num_bytes += end - start
        if self._form.num_bytes > self._max_bytes:
            message = f"The file is larger than {self._max_bytes} bytes."
            raise ApiError(413, message, headers={"connection": "close"})
        self._unwritten.append(bytes(data[start:end]))
        self._num_unwritten += end - start

    def _end_part(self) -> None:
        if not self._is_file:
            value = self._value.decode("utf-8", "replace")
            if self._name.endswith("[]") and self._name in self._form.fields:
                value = f"{self._form.fields[self._name]},{value}"  # an item of a list
            self._form.fields[self._name] = value

    def _end(self) -> None:
        self._complete = True


def _safe_filename(given: str) -> str:
    """A filename that is safe to display: no directories, no control characters, not empty."""
    name = _CONTROLS.sub("", given.replace("\\", "/").rpartition("/")[2])
    return name[:_MAX_FILENAME] or "upload"


def _malformed(reason: str) -> ApiError:
    message = f"The body is not a valid form: {reason[:200]}."
    return ApiError(400, message, code="invalid_form")

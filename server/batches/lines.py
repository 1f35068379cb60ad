"""The lines of a batch's input: one request each, all validated before any of them runs."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from server.errors import ApiError, shorten
from server.openai.json_body import parse_json_body

MAX_LINES = 50_000
WINDOW, WINDOW_S = "24h", 24 * 3600  # in which a batch is answered
MAX_ERRORS = 100  # reported per input
_MAX_ID = 512
_CHUNK_BYTES = 2**20  # per read, or a line if that is longer


class Line(msgspec.Struct, frozen=True):
    """One request of a batch."""

    number: int  # line number in the file, from 1
    custom_id: str
    url: str
    body: dict[str, Any]


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """An error in an input."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class LineError(Exception):
    """An error in a line."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param
        self.line: int | None = None  # number of the line, from 1

    def report(self) -> BatchError:
        """The error as the batch's owner sees it."""
        return BatchError(code=self.code, message=self.message, param=self.param, line=self.line)


async def read_raw_lines(path: Path, max_bytes: int) -> AsyncGenerator[list[tuple[int, bytes]]]:
    """The non-blank lines of a file with their numbers, in chunks.

    A line over ``max_bytes`` is cut, but stays longer than that. Raises OSError.
    """
    file = await asyncio.to_thread(path.open, "rb")
    with file:
        lines = _numbered(file, max_bytes)
        while chunk := await asyncio.to_thread(_read_chunk, lines):
            yield chunk


async def read_lines(
    path: Path, endpoints: Collection[str], max_bytes: int, skip: Collection[int] = ()
) -> AsyncGenerator[Line]:
    """The requests of a validated input, except for the lines ``skip``.

    Raises OSError, and LineError: the limit of a line's length is lower than it was.
    """
    async with contextlib.aclosing(read_raw_lines(path, max_bytes)) as chunks:
        async for chunk in chunks:
            for number, text in chunk:
                if number in skip:
                    continue
                try:
                    line = parse_line(number, text, endpoints, max_bytes)
                except LineError as fault:
                    fault.line = number
                    raise
                yield line


class InputValidator:
    """Validates an input line by line.

    Args:
        endpoints: the allowed URLs of requests.
        has_model: whether a model is served under a name.
        max_bytes: the longest line.
        max_lines: the most lines; None is no limit.
    """

    def __init__(
        self,
        endpoints: Collection[str],
        has_model: Callable[[str], bool],
        max_bytes: int,
        max_lines: int | None = MAX_LINES,
    ) -> None:
        self._endpoints = endpoints
        self._has_model = has_model
        self._max_bytes = max_bytes
        self._max_lines = math.inf if max_lines is None else max_lines
        self._ids: set[str] = set()
        self.num_lines = 0
        self.model: str | None = None  # of the first line
        self.errors: list[BatchError] = []

    @property
    def ids(self) -> frozenset[str]:
        """The ids of the valid requests."""
        return frozenset(self._ids)

    async def validate(self, path: Path) -> None:
        """Validate a whole file, up to the maximum number of errors. Raises OSError."""
        async with contextlib.aclosing(read_raw_lines(path, self._max_bytes)) as chunks:
            async for chunk in chunks:
                await asyncio.to_thread(self._validate_chunk, chunk)
                if len(self.errors) >= MAX_ERRORS or self.num_lines > self._max_lines:
                    break
        if self.num_lines > self._max_lines:
            message = f"A batch holds at most {self._max_lines} requests."
            self.errors = [BatchError(code="too_many_requests", message=message)]
        elif not self.num_lines:
            self.errors = [BatchError(code="empty_file", message="The input file is empty.")]

    def _validate_chunk(self, chunk: list[tuple[int, bytes]]) -> None:
        for number, text in chunk:
            self.num_lines += 1
            try:
                self._validate_line(parse_line(number, text, self._endpoints, self._max_bytes))
            except LineError as fault:
                fault.line = number
                if len(self.errors) < MAX_ERRORS:
                    self.errors.append(fault.report())

    def _validate_line(self, line: Line) -> None:
        if line.custom_id in self._ids:
            message = (
                f"The custom_id '{shorten(line.custom_id, 64)}' is already used by an earlier line."
            )
            raise LineError("duplicate_custom_id", message, "custom_id")
        self._ids.add(line.custom_id)
        model = line.body.get("model")
        if not isinstance(model, str):
            raise LineError("missing_required_parameter", "'model' must be a string.", "body.model")
        if not self._has_model(model):
            message = f"The model '{shorten(model, 64)}' does not exist here."
            raise LineError("model_not_found", message, "body.model")
        if line.body.get("stream"):
            message = "'stream' is not available in a batch."
            raise LineError("invalid_parameter", message, "body.stream")
        if self.model is None:
            self.model = model


def parse_line(number: int, text: bytes, endpoints: Collection[str], max_bytes: int) -> Line:
    """Parse the request in a line. Raises LineError if it is not a valid one for ``endpoints``."""
    if len(text) > max_bytes:
        raise LineError("line_too_long", f"The line is longer than {max_bytes} bytes.")
    try:
        fields = parse_json_body(text)
    except ApiError as error:
        message = error.message.replace("The body", "The line", 1)
        raise LineError("invalid_json_line", message) from None
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID:
        message = f"'custom_id' must be a string of 1 to {_MAX_ID} characters."
        raise LineError("missing_required_parameter", message, "custom_id")
    if fields.get("method") != "POST":
        raise LineError("invalid_method", "'method' must be 'POST'.", "method")
    url = fields.get("url")
    if not isinstance(url, str) or url not in endpoints:
        message = f"'url' must be {' or '.join(endpoints)}."
        raise LineError("invalid_url", message, "url")
    body = fields.get("body")
    if not isinstance(body, dict):
        raise LineError("missing_required_parameter", "'body' must be an object.", "body")
    return Line(number, custom_id, url, body)


def _numbered(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    number = 0
    while text := file.readline(max_bytes + 2):
        number += 1
        rest = text
        while not rest.endswith(b"\n") and (rest := file.readline(_CHUNK_BYTES)):
            pass  # the rest of an overlong line is dropped
        if text.strip():
            yield number, text.rstrip(b"\r\n")


def _read_chunk(lines: Iterator[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """The next of ``lines``, up to a chunk's size."""
    chunk: list[tuple[int, bytes]] = []
    num_bytes = 0
    for number, text in lines:
        chunk.append((number, text))
        num_bytes += len(text)
        if num_bytes >= _CHUNK_BYTES:
            break
    return chunk

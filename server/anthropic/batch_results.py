"""The results of a batch's requests, in the shapes of the Messages API.

The results are in two files, written by ``server/batches/outputs.py``; they are converted line by
line.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from server.anthropic.errors import error_type
from server.anthropic.outputs import MessagesError, MessagesErrorDetail
from server.batches.lines import read_raw_lines
from server.openai.outputs import to_json

_ANY_LENGTH = 2**40  # bytes of a line; the server wrote them


class BatchResult(Struct, kw_only=True):
    """The result of one request: a response, an error, or neither."""

    type: Literal["succeeded", "errored", "canceled", "expired"]
    message: msgspec.Raw | UnsetType = UNSET  # in the shape of a response
    error: MessagesError | UnsetType = UNSET


class BatchResultLine(Struct, kw_only=True):
    """One line of the results."""

    custom_id: str
    result: BatchResult


class _Error(Struct):
    message: str = ""
    code: str | None = None


class _ErrorBody(Struct):
    error: _Error


class _Response(Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Line(Struct):
    custom_id: str
    response: _Response | None = None
    error: _Error | None = None


_decode_line = msgspec.json.Decoder(_Line).decode


async def results(paths: Sequence[Path]) -> AsyncGenerator[bytes]:
    """The results in these files as lines of JSON, in chunks. Raises OSError."""
    for path in paths:
        async with contextlib.aclosing(read_raw_lines(path, _ANY_LENGTH)) as chunks:
            async for chunk in chunks:
                yield b"".join(
                    [to_json(to_result_line(_decode_line(text))) + b"\n" for _, text in chunk]
                )


def to_result_line(line: _Line) -> BatchResultLine:
    """Convert a line of a results file to this API's shape."""
    return BatchResultLine(custom_id=line.custom_id, result=_result(line))


def _result(line: _Line) -> BatchResult:
    response = line.response
    if response is None:  # it did not run to completion
        cancelled = line.error is not None and line.error.code == "batch_cancelled"
        return BatchResult(type="canceled" if cancelled else "expired")
    if response.status_code == 200:
        return BatchResult(type="succeeded", message=response.body)
    message = msgspec.json.decode(response.body, type=_ErrorBody).error.message
    detail = MessagesErrorDetail(error_type(response.status_code), message)
    error = MessagesError(error=detail, request_id=response.request_id)
    return BatchResult(type="errored", error=error)

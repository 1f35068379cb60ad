"""Execution of one line, by the same calls that answer HTTP requests."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from server.batches.lines import Line
from server.errors import ApiError, to_api_error
from server.openai.outputs import to_json
from server.store.batches import LineResult

LineHandler = Callable[[dict[str, Any]], Awaitable[Any]]  # a body -> the response, to be encoded
_log = logging.getLogger(__name__)

_MAX_TRIES = 5  # of a line that fails through no fault of its own
_UNCOUNTED_CODES = ("engine_unavailable", "engine_asleep")  # reasons that do not count as tries
_INITIAL_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 15.0


class _InputDetails(msgspec.Struct):
    cached_tokens: int = 0


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    """Token counts, under the names of all endpoints."""

    prompt_tokens: int = 0
    input_tokens: int = 0
    completion_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _InputDetails | None = None
    input_tokens_details: _InputDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    output_tokens_details: _OutputDetails | None = None


class _ResponseBody(msgspec.Struct):
    usage: _Usage | None = None


async def run_line(line: Line, handler: LineHandler) -> LineResult:
    """Run a line and return its result, which may be an error; a cancelled line has none.

    A line is retried if the engine restarts, is asleep, or has no room: without limit while the
    engine is unavailable, and a few times while it is available.
    """
    pause_s, num_tries = _INITIAL_BACKOFF_S, 0
    while True:
        request_id = f"req_{uuid.uuid4().hex}"
        try:
            body = to_json(await handler(line.body))
        except Exception as error:
            api_error = to_api_error(error, request_id)
            if api_error.status == 500:
                _log.error("request %s of a batch failed", request_id, exc_info=error)
            num_tries += api_error.code not in _UNCOUNTED_CODES
            if api_error.status < 500 or num_tries >= _MAX_TRIES:
                return _failed(line, request_id, api_error)
        else:
            return _succeeded(line, request_id, body)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_BACKOFF_S)


def not_run_line(line: Line, code: str, message: str) -> bytes:
    """The error file's line for a request that did not run to completion."""
    return _line(line, None, {"code": code, "message": message})


def _succeeded(line: Line, request_id: str, body: bytes) -> LineResult:
    usage = msgspec.json.decode(body, type=_ResponseBody).usage or _Usage()
    before = usage.prompt_tokens_details or usage.input_tokens_details or _InputDetails()
    after = usage.completion_tokens_details or usage.output_tokens_details or _OutputDetails()
    return LineResult(
        line=line.number,
        ok=True,
        text=_line(line, _response(200, request_id, body)),
        input_tokens=usage.prompt_tokens or usage.input_tokens,
        cached_tokens=before.cached_tokens,
        output_tokens=usage.completion_tokens or usage.output_tokens,
        reasoning_tokens=after.reasoning_tokens,
    )


def _failed(line: Line, request_id: str, error: ApiError) -> LineResult:
    text = _line(line, _response(error.status, request_id, error.body()))
    return LineResult(line=line.number, ok=False, text=text)


def _response(status: int, request_id: str, body: bytes) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}


def _line(line: Line, response: Any, error: Any = None) -> bytes:
    return to_json(
        {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": line.custom_id,
            "response": response,
            "error": error,
        }
    )

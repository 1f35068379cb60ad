"""The common work of all endpoints: read the body, generate, and answer with JSON or SSE."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from tempfile import SpooledTemporaryFile
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from engine.errors import ContextLengthExceeded
from engine.text.tokenizer import Tokenizer
from server.access.body import check_json_type
from server.access.caller import Caller, caller_of
from server.errors import bad_field
from server.http.disconnect import ClientDisconnected, until_disconnect
from server.openai.api_model import ApiModel
from server.openai.deadline import caller_with_deadline, until_deadline
from server.openai.inputs import GenerationRequest
from server.openai.json_body import parse_json_body
from server.openai.outputs import to_json
from server.openai.sse import Ending, EventStream
from server.openai.structured import StructuredFields, requested_grammar
from server.openai.unsupported import report_ignored
from server.settings import Settings
from server.state import Model, ServerState
from server.store.database import StoreError, reason_of

_BodyT = TypeVar("_BodyT", bound=ApiModel)
_GenerationT = TypeVar("_GenerationT", bound=GenerationRequest)
_MAX_CHARS_PER_TOKEN = 128  # longer than the tokens of any vocabulary that is not mostly spaces
_BODY_IN_MEMORY_BYTES = 2 * 2**20
# What is longer is dealt with on a thread, to keep the event loop free.
_INLINE_BODY_BYTES = 64 * 2**10  # of JSON, to be parsed and checked
INLINE_CHARS = 4096  # of texts, to be tokenised


def state_of(request: Request) -> ServerState:
    """The application's shared state."""
    return request.app.state.server


async def read_request(
    request: Request, shape: type[_BodyT], *, optional: bool = False
) -> tuple[_BodyT, dict[str, str]]:
    """Parse the request's body as ``shape``; also return the header that names ignored fields.

    With ``optional``, a missing body is read as an empty object.

    Raises:
        ApiError: the body is not JSON or too long, or a field is invalid.
        ClientDisconnected: the connection closed before the body was complete.
    """
    if optional and not _has_body(request):
        return shape.read({}), {}
    settings = state_of(request).settings
    check_json_type(request.scope)
    data = await _read_body(request)

    def read() -> tuple[_BodyT, dict[str, str]]:
        return read_fields(settings, shape, parse_json_body(data))

    return read() if len(data) <= _INLINE_BODY_BYTES else await asyncio.to_thread(read)


def read_fields(
    settings: Settings, shape: type[_BodyT], fields: dict[str, Any]
) -> tuple[_BodyT, dict[str, str]]:
    """Parse ``fields`` as ``shape``; see ``read_request``. Raises ApiError (400)."""
    for name, limit in (("messages", settings.max_messages), ("prompt", settings.max_prompts)):
        _check_count(name, fields.get(name), limit)
    body = shape.read(fields)
    ignored = body.ignored() + shape.unread(fields)
    has_priorities = settings.policy in ("priority", "fair")
    if not has_priorities and "priority" not in ignored and getattr(body, "priority", None):
        ignored.append("priority")
    return body, report_ignored(ignored, strict=settings.strict)


class Call(Protocol):
    """A validated and encoded generation request; made by an endpoint, answered by ``respond``."""

    async def complete(self) -> Any:
        """The whole response."""
        ...

    def events(self) -> AsyncGenerator[bytes]:
        """The response as server-sent events, without the closing event."""
        ...


async def respond(
    request: Request,
    shape: type[_GenerationT],
    prepare: Callable[[ServerState, Caller, _GenerationT], Awaitable[Call]],
) -> Response:
    """Answer a generation request, whole or as a stream; abort it if the client disconnects.

    Args:
        request: its body is read here.
        shape: the body's shape.
        prepare: validates a caller's body against the model, and encodes it.
    """
    state = state_of(request)
    state.check_capacity(caller_of(request))  # a caller over its share costs others no more
    body, headers = await read_request(request, shape)
    caller = caller_with_deadline(request, body.deadline_ms, state.settings.default_deadline_s)

    async def prepared() -> Call:
        async with until_deadline(caller):  # the model may be loading, or the template slow
            return await prepare(state, caller, body)

    return await serve_call(request, prepared, stream=bool(body.stream), headers=headers)


async def serve_call(
    request: Request,
    prepare: Callable[[], Awaitable[Call]],
    *,
    stream: bool,
    headers: Mapping[str, str],
    ending: Ending | None = None,
) -> Response:
    """Answer a request whose body has been read; see ``respond``.

    Args:
        request: aborted if its client disconnects.
        prepare: makes the call.
        stream: whether to send events or the whole response.
        headers: of the response.
        ending: how a stream ends; OpenAI's ``[DONE]`` by default.
    """
    if stream:
        heartbeat_s = state_of(request).settings.heartbeat_s
        return EventStream(
            _events(prepare), heartbeat_s=heartbeat_s, headers=headers, ending=ending
        )
    async with until_disconnect(request.receive):
        whole = await (await prepare()).complete()
    return json_response(whole, headers)


async def _events(prepare: Callable[[], Awaitable[Call]]) -> AsyncGenerator[bytes]:
    """The stream including its preparation, so that heartbeats and disconnects cover that too."""
    call = await prepare()
    async with contextlib.aclosing(call.events()) as events:
        async for event in events:
            yield event


def json_response(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A response of one JSON object."""
    return Response(to_json(value), media_type="application/json", headers=dict(headers or {}))


def new_id(prefix: str) -> str:
    """A new unique id for a response."""
    return f"{prefix}-{uuid.uuid4().hex}"


async def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Token ids of ``texts``; spellings of special tokens in them are plain text.

    Raises:
        InvalidParameter: a text cannot be encoded.
    """
    if sum(map(len, texts)) <= INLINE_CHARS:
        return tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(
        tokenizer.encode_batch, texts, add_special_tokens=add_special_tokens
    )


async def check_grammar(state: ServerState, body: StructuredFields) -> None:
    """Reject a request whose grammar cannot be enforced, before its response begins.

    Raises:
        ApiError: 400 that names the field with the grammar.
    """
    held = requested_grammar(body)
    if held is not None:
        await state.grammars.check(held.grammar, param=held.param)


def check_length(text_chars: int, model: Model, param: str) -> None:
    """Reject a text too long for any context before spending time on encoding it."""
    if text_chars > model.info.max_model_len * _MAX_CHARS_PER_TOKEN:
        message = (
            f"This model's maximum context length is {model.info.max_model_len} tokens, far fewer "
            f"than {text_chars} characters make."
        )
        raise ContextLengthExceeded(message, param=param)


def _has_body(request: Request) -> bool:
    """Whether there is a body: HTTP/1.1 requests without either header have none."""
    headers = request.headers
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


async def _read_body(request: Request) -> bytes:
    """The whole body. A long one waits on disk, so that a refused request costs no memory."""
    try:
        with SpooledTemporaryFile(max_size=_BODY_IN_MEMORY_BYTES) as body:
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                body.write(message.get("body", b""))
                if not message.get("more_body", False):
                    body.seek(0)
                    return body.read()
    except OSError as error:
        raise StoreError(reason_of(error)) from error


def _check_count(name: str, value: Any, limit: int) -> None:
    """Bound a list's length before its items are validated. A list of token ids is one prompt."""
    if isinstance(value, list) and len(value) > limit and not isinstance(value[0], int):
        raise bad_field(name, f"holds {len(value)} items; the limit is {limit}")

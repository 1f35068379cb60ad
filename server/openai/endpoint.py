"""What every endpoint does before and after its own work: read the body, answer JSON."""

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
from server.http.disconnect import ClientGone, until_disconnect
from server.openai.deadline import caller_until, until_deadline
from server.openai.inputs import GenerationRequest, Shape
from server.openai.json_body import parse_json_body
from server.openai.outputs import to_json
from server.openai.sse import Ending, EventStream
from server.openai.structured import StructuredFields, held_to
from server.openai.unsupported import report_ignored
from server.settings import Settings
from server.state import Model, ServerState

_ShapeT = TypeVar("_ShapeT", bound=Shape)
_GenerationT = TypeVar("_GenerationT", bound=GenerationRequest)
_MAX_CHARS_A_TOKEN = 128  # longer than the tokens of any vocabulary that is not mostly spaces
_BODY_IN_MEMORY_BYTES = 2 * 2**20
_INLINE_CHARS = 4096  # longer texts are tokenised on a thread, where they hold nobody up


def state_of(request: Request) -> ServerState:
    """The application's shared state."""
    return request.app.state.server


async def read_request(
    request: Request, shape: type[_ShapeT], *, optional: bool = False
) -> tuple[_ShapeT, dict[str, str]]:
    """The request's body as ``shape``, and the header that names what has no effect.

    With ``optional`` a request without a body is read as one with an empty object.

    Raises:
        ApiError: the body is not JSON, too long, or a field is at fault.
        ClientGone: the connection closed before the body was complete.
    """
    if optional and not _declares_body(request):
        return shape.read({}), {}
    settings = state_of(request).settings
    check_json_type(request.scope)
    return read_fields(settings, shape, parse_json_body(await _read_body(request)))


def read_fields(
    settings: Settings, shape: type[_ShapeT], fields: dict[str, Any]
) -> tuple[_ShapeT, dict[str, str]]:
    """``fields`` as ``shape``, as ``read_request`` has it. Raises ApiError (400)."""
    for name, limit in (("messages", settings.max_messages), ("prompt", settings.max_prompts)):
        _check_count(name, fields.get(name), limit)
    body = shape.read(fields)
    ignored = body.ignored()
    if getattr(body, "priority", None) and settings.scheduling_policy not in ("priority", "fair"):
        ignored.append("priority")
    return body, report_ignored(ignored, strict=settings.strict)


class Call(Protocol):
    """A generating request, judged and encoded; made by an endpoint, answered by ``respond``."""

    async def complete(self) -> Any:
        """The whole answer."""
        ...

    def events(self) -> AsyncGenerator[bytes]:
        """The answer as server-sent events, without what closes the stream."""
        ...


async def respond(
    request: Request,
    shape: type[_GenerationT],
    prepare: Callable[[ServerState, Caller, _GenerationT], Awaitable[Call]],
) -> Response:
    """Answer a generating request, at once or as a stream, and drop it when the client goes.

    Args:
        request: its body is read here.
        shape: what the body must be.
        prepare: judges the body of a caller against the model, and encodes it.
    """
    state = state_of(request)
    state.check_room(caller_of(request))  # who is over its share costs the others nothing more
    body, headers = await read_request(request, shape)
    caller = caller_until(request, body.deadline_ms, state.settings.default_deadline_s)

    async def prepared() -> Call:
        async with until_deadline(caller):  # the model may be loading, or the template slow
            return await prepare(state, caller, body)

    return await answer(request, prepared, stream=bool(body.stream), headers=headers)


async def answer(
    request: Request,
    prepare: Callable[[], Awaitable[Call]],
    *,
    stream: bool,
    headers: Mapping[str, str],
    ending: Ending | None = None,
) -> Response:
    """Answer a request whose body has been read; see ``respond``.

    Args:
        request: dropped when its client goes.
        prepare: makes the call.
        stream: whether its events are wanted, or the whole at once.
        headers: of the answer.
        ending: how a stream ends; OpenAI's ``[DONE]`` when left out.
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
    """The stream from its very beginning, so that heartbeats and hang-ups reach the waiting too."""
    call = await prepare()
    async with contextlib.aclosing(call.events()) as events:
        async for event in events:
            yield event


def json_response(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """An answer of one JSON object."""
    return Response(to_json(value), media_type="application/json", headers=dict(headers or {}))


def new_id(prefix: str) -> str:
    """A fresh id for an answer."""
    return f"{prefix}-{uuid.uuid4().hex}"


async def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Token ids of ``texts``; special-token spellings in them are plain text.

    Raises:
        InvalidParameter: a text cannot be encoded.
    """
    if sum(map(len, texts)) <= _INLINE_CHARS:
        return tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(
        tokenizer.encode_batch, texts, add_special_tokens=add_special_tokens
    )


async def check_grammar(state: ServerState, body: StructuredFields) -> None:
    """Refuse a request whose grammar could not be held, before its answer begins.

    Raises:
        ApiError: 400 that names the field which asked for the grammar.
    """
    held = held_to(body)
    if held is not None:
        await state.grammars.check(held.grammar, param=held.param)


def check_length(text_chars: int, model: Model, param: str) -> None:
    """Refuse a text that is too long for any context before time is spent on encoding it."""
    if text_chars > model.info.max_model_len * _MAX_CHARS_A_TOKEN:
        message = (
            f"This model's maximum context length is {model.info.max_model_len} tokens, far fewer "
            f"than {text_chars} characters make."
        )
        raise ContextLengthExceeded(message, param=param)


def _declares_body(request: Request) -> bool:
    """HTTP/1.1: a request with neither header has no body."""
    headers = request.headers
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


async def _read_body(request: Request) -> bytes:
    """The whole body. A long one waits on disk, so that one which is refused cost no memory."""
    with SpooledTemporaryFile(max_size=_BODY_IN_MEMORY_BYTES) as body:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body.write(message.get("body", b""))
            if not message.get("more_body", False):
                body.seek(0)
                return body.read()


def _check_count(name: str, value: Any, limit: int) -> None:
    """Bound a list before its items are looked at. A list of token ids is one prompt."""
    if isinstance(value, list) and len(value) > limit and not isinstance(value[0], int):
        raise bad_field(name, f"holds {len(value)} items; the limit is {limit}")

"""One response, from its request to its events and into the store."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from engine.types import SamplingParams
from server.access.caller import Caller
from server.errors import ApiError, bad_field, to_api_error
from server.openai.conversation import Conversation
from server.openai.inputs import ChatRequest
from server.openai.logprobs import chat_logprobs
from server.openai.outputs import to_json
from server.openai.responses.builder import ResponseBuilder
from server.openai.responses.context import load_history, resolve_items, truncate_to_fit
from server.openai.responses.events import ErrorEvent, Event, Numbering, to_sse
from server.openai.responses.inputs import ENCRYPTED, ResponseInput, ResponsesRequest
from server.openai.responses.items import Item, read_item
from server.openai.responses.outputs import (
    ConversationReference,
    ReasoningConfig,
    Response,
    ResponseStatus,
)
from server.openai.responses.strictness import find_unenforceable
from server.openai.responses.tools import echo_tools
from server.openai.responses.translate import chat_body, translate_errors
from server.state import ServerState
from server.store.conversations import StoredItem
from server.store.database import StoreError
from server.store.responses import ResponseStore, StoredResponse

_log = logging.getLogger(__name__)
_decode = msgspec.json.Decoder(Response).decode


class StreamEnding:
    """The end of a Responses stream: the response's own last event, and nothing after it.

    An error outside the response is an ``error`` event with the next number.
    """

    end = b""

    def __init__(self) -> None:
        self.numbering = Numbering()

    def error(self, answer: ApiError) -> bytes:
        """See ``sse.Ending``."""
        return to_sse(
            ErrorEvent(
                sequence_number=self.numbering.next(),
                code=answer.code,
                message=answer.message,
                param=answer.param,
            )
        )


class ResponseCall:
    """A validated and encoded request, ready to be answered once."""

    def __init__(
        self,
        state: ServerState,
        caller: Caller,
        request: ResponsesRequest,
        input_items: Sequence[Item],
        conversation: Conversation,
        numbering: Numbering,
        loose: Collection[str] = (),
    ) -> None:
        self._caller = caller
        self._request = request
        self._input_items = input_items
        self._conversation = conversation
        self._store = ResponseStore(state.database)
        self._builder = ResponseBuilder(
            _initial_response(request, conversation, loose),
            numbering,
            time.time,
            request.tools.offered,
            reasoning_as_summary=request.summary is not None,
            include_encrypted=ENCRYPTED in (request.include or ()),
        )

    @classmethod
    async def prepare(
        cls,
        state: ServerState,
        caller: Caller,
        request: ResponsesRequest,
        numbering: Numbering | None = None,
    ) -> ResponseCall:
        """Validate a request, look up the history it continues, and encode the whole.

        Raises:
            ApiError: a field is invalid, or nothing can be served.
            RequestError: the same, found by the engine's own rules.
        """
        prepared = await prepare_conversation(state, caller, request, new_response_id())
        return cls(
            state,
            caller,
            request,
            prepared.input_items,
            prepared.conversation,
            numbering or Numbering(),
            prepared.loose,
        )

    @property
    def response(self) -> Response:
        """The response in its current state."""
        return self._builder.response

    async def complete(self) -> Response:
        """The whole response."""
        async for _ in self.steps():
            pass
        return await self.save()

    async def events(self) -> AsyncGenerator[bytes]:
        """The response as server-sent events. Errors after the first event are events too."""
        try:
            async for events in self.steps():
                yield b"".join(map(to_sse, events))
        except Exception as error:
            if not self._builder.has_started:
                raise
            last = self.fail(error)
        else:
            last = None
        await self.save()
        yield b"".join(map(to_sse, last or self._builder.finish()))

    async def steps(self) -> AsyncGenerator[list[Event]]:
        """Yield the events of the output, all but the last one.

        Raises what ``Generation`` raises; no event has been yielded before the first list.
        """
        assembly, conversation = self._builder, self._conversation
        wants_logprobs = self._request.wants_logprobs
        with translate_errors(), conversation.generation() as generation:
            yield assembly.begin()
            async for turns in conversation.parsed_steps(generation):
                for _, parts, delta in turns:
                    logprobs = chat_logprobs(delta.logprobs).content if wants_logprobs else []
                    events = assembly.push(parts, logprobs)
                    if events:
                        yield events
        yield assembly.end(generation.choices[0].finish_reason, generation.usage)

    def queued(self) -> list[Event]:
        """The first events of a response that waits for its turn."""
        return self._builder.queued()

    def requeue(self) -> bool:
        """Allow ``steps`` to be called again after it raised; false if output was already sent."""
        return self._builder.requeue()

    def finish(self) -> list[Event]:
        """The final event, once ``steps`` is exhausted."""
        return self._builder.finish()

    def fail(self, error: Exception) -> list[Event]:
        """The final event if ``steps`` raised."""
        api_error = to_api_error(error, self.response.id)
        if api_error.status == 500:
            _log.error("response %s failed", self.response.id, exc_info=error)
        return self._builder.fail(api_error)

    def cancel(self) -> list[Event]:
        """The final event after a cancellation, which drops the answer."""
        return self._builder.cancel()

    async def save(self) -> Response:
        """Store the response in its current state, if the request asks for it.

        If the store fails, the answer is still returned; it then says that it is not stored, and
        belongs to no conversation.
        """
        response = self.response
        try:
            if response.store:
                await self._store.add(self.stored(), to_stored_items(self._input_items))
            elif response.conversation is not None:
                await self._store.add_turn(self.stored(), to_stored_items(self._input_items))
        except StoreError:
            response.store, response.conversation = False, None
        return response

    async def save_queued(self) -> None:
        """Store the response before generation. Raises StoreError."""
        await self._store.add(self.stored(), to_stored_items(self._input_items))

    def stored(self) -> StoredResponse:
        """The response in its current state, in the store's form."""
        return to_stored(self.response, self._caller.tenant)


class Prepared(NamedTuple):
    """A request that has been validated and encoded."""

    input_items: list[Item]  # the request's own
    conversation: Conversation  # with their history
    loose: Collection[str]  # names of tools whose calls need not satisfy their schemas


async def prepare_conversation(
    state: ServerState, caller: Caller, request: ResponseInput, id: str
) -> Prepared:
    """Validate and encode a request.

    Raises what ``ResponseCall.prepare`` raises.
    """
    most = state.settings.max_messages
    if len(request.input) > most:
        raise bad_field("input", f"holds {len(request.input)} items; at most {most} are taken")
    earlier = await load_history(state.database, caller, request)
    given = await resolve_items(state.database, state.files, caller, request.input, "input")
    if request.conversation is not None:
        said = {item.id for item in earlier}
        for index, item in enumerate(given):
            if item.id in said:
                raise bad_field(f"input.{index}.id", "is in the conversation already")

    loose: frozenset[str] = frozenset()

    async def prepare(items: Sequence[Item]) -> Conversation:
        with translate_errors(request.tools):
            body = ChatRequest.read(chat_body(request, items, loose))
            return await Conversation.prepare(state, caller, body, id=id)

    truncate, items = request.truncation == "auto", [*earlier, *given]
    undecided = [tool for tool in request.tools.offered if tool.may_be_loose]
    all_loose = frozenset(tool.name for tool in undecided)
    while True:
        try:
            conversation = await truncate_to_fit(items, prepare, truncate=truncate)
            return Prepared(given, conversation, loose)
        except ApiError as error:
            if error.param != "tools" or loose == all_loose:
                raise
        if loose:  # the others are too much together
            loose = all_loose
        else:
            model = await state.get_model(request.model)
            loose = await find_unenforceable(state, model, undecided)


def new_response_id() -> str:
    """A new id ``resp_...``."""
    return f"resp_{uuid.uuid4().hex}"


def to_stored_items(items: Sequence[Item]) -> list[StoredItem]:
    """Items in the store's form."""
    return [StoredItem(item.id, to_json(item)) for item in items]


def to_stored(response: Response, tenant: str) -> StoredResponse:
    """A response in the store's form: its output is stored item by item."""
    body = msgspec.structs.replace(response, output=[])
    return StoredResponse(
        id=response.id,
        tenant=tenant,
        created_at=response.created_at,
        status=response.status,
        background=response.background,
        previous_id=response.previous_response_id,
        body=to_json(body),
        output=to_stored_items(response.output),
        conversation_id=None if response.conversation is None else response.conversation.id,
    )


def from_stored(stored: StoredResponse) -> Response:
    """A response from its stored form."""
    response = _decode(stored.body)
    response.status = cast("ResponseStatus", stored.status)
    response.output = [read_item(item.body) for item in stored.output]
    return response


def _initial_response(
    request: ResponsesRequest, conversation: Conversation, loose: Collection[str]
) -> Response:
    """The response before any output, with defaults filled in."""
    sampling: SamplingParams = conversation.sampling
    reasoning = request.reasoning
    return Response(
        id=conversation.id,
        created_at=int(time.time()),
        status="in_progress",
        conversation=None
        if request.conversation is None
        else ConversationReference(request.conversation),
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=conversation.model.name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=ReasoningConfig(None if reasoning is None else reasoning.effort, request.summary),
        safety_identifier=request.safety_identifier,
        store=request.should_store,
        temperature=sampling.temperature,
        text=_text_config(request),
        tool_choice=request.tool_choice or "auto",
        tools=echo_tools(request.tools, loose),
        top_logprobs=request.top_logprobs or 0,
        top_p=sampling.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
        metadata=request.metadata or {},
    )


def _text_config(request: ResponsesRequest) -> dict[str, Any]:
    text = request.text
    form: dict[str, Any] = {"type": "text"}
    if text is not None and text.format is not None:
        form = text.format.model_dump(by_alias=True, exclude_none=True)
    return {"format": form, "verbosity": (text and text.verbosity) or "medium"}

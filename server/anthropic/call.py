"""One Messages request: its conversation, and the response in this API's shapes."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator

import msgspec

from server.access.caller import Caller
from server.anthropic.blocks import BlockWriter, complete_blocks
from server.anthropic.errors import error_detail
from server.anthropic.inputs import MessagesRequest, TokenCountRequest
from server.anthropic.message_files import with_file_contents
from server.anthropic.outputs import (
    MessageAnswer,
    MessageDelta,
    MessageEvent,
    MessageTokensDetails,
    MessageUsage,
    StopReason,
    to_sse,
)
from server.anthropic.translate import chat_body, translate_errors
from server.errors import ApiError
from server.openai.choice import Choice
from server.openai.conversation import Conversation
from server.openai.generation import Generation
from server.openai.inputs import ChatRequest
from server.state import ServerState
from server.text.parts import Part


class MessageEnding:
    """The end of a Messages stream: nothing after ``message_stop``, or an error event."""

    end = b""

    def error(self, answer: ApiError) -> bytes:
        """See ``sse.Ending``."""
        return to_sse(MessageEvent(type="error", error=error_detail(answer)))


async def prepare_conversation(
    state: ServerState, caller: Caller, request: TokenCountRequest, id: str | None = None
) -> Conversation:
    """The validated and encoded conversation that a request continues.

    Raises:
        ApiError: a field is invalid, a file cannot be used, or nothing can be served.
        RequestError: the same, found by the engine's own rules.
        StoreError: a file cannot be read.
    """
    request = await with_file_contents(state.files, caller, request)
    with translate_errors(request):
        body = ChatRequest.read(chat_body(request))
        return await Conversation.prepare(state, caller, body, id=id)


class MessageCall:
    """A validated and encoded request, ready to be answered once."""

    def __init__(self, request: MessagesRequest, conversation: Conversation) -> None:
        self._conversation = conversation
        left = conversation.model.info.max_model_len - len(conversation.prompt)
        # max_tokens may exceed the context; the stop reason then says that the context was full.
        self._fills_context = request.max_tokens > left
        conversation.sampling = msgspec.structs.replace(
            conversation.sampling,
            max_tokens=min(request.max_tokens, left),
            stop=tuple(request.stop_sequences or ()),
        )

    @classmethod
    async def prepare(
        cls, state: ServerState, caller: Caller, request: MessagesRequest
    ) -> MessageCall:
        """Judge a request against the model and encode its messages; raises as
        ``prepare_conversation``."""
        return cls(
            request, await prepare_conversation(state, caller, request, f"msg_{uuid.uuid4().hex}")
        )

    async def complete(self) -> MessageAnswer:
        """The whole response."""
        conversation = self._conversation
        parts: list[Part] = []
        with translate_errors(), conversation.generation() as generation:
            async for turns in conversation.parsed_steps(generation):
                for _, gained, _ in turns:
                    parts += gained
        answer = self._initial_message(generation)
        answer.content = complete_blocks(parts)
        answer.stop_reason, answer.stop_sequence = self._stop_reason(generation.choices[0])
        return answer

    async def events(self) -> AsyncGenerator[bytes]:
        """The response as server-sent events."""
        conversation = self._conversation
        writer = BlockWriter()
        begun = False
        with translate_errors(), conversation.generation() as generation:
            async for turns in conversation.parsed_steps(generation):
                events: list[MessageEvent] = []
                if not begun:  # the cached tokens are known with the first output
                    begun = True
                    start = MessageEvent(
                        type="message_start", message=self._initial_message(generation)
                    )
                    events = [start, MessageEvent(type="ping")]
                for _, parts, _ in turns:
                    events += writer.push(parts)
                if events:
                    yield b"".join(map(to_sse, events))
        reason, sequence = self._stop_reason(generation.choices[0])
        delta = MessageDelta(stop_reason=reason, stop_sequence=sequence)
        end = MessageEvent(type="message_delta", delta=delta, usage=_usage(generation))
        last = [*writer.close(), end, MessageEvent(type="message_stop")]
        yield b"".join(map(to_sse, last))

    def _initial_message(self, generation: Generation) -> MessageAnswer:
        return MessageAnswer(
            id=self._conversation.id,
            model=self._conversation.model.name,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=_usage(generation),
        )

    def _stop_reason(self, choice: Choice) -> tuple[StopReason, str | None]:
        """The stop reason, and the stop sequence if one ended the answer."""
        sequence = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        reason: StopReason
        match choice.finish_reason:
            case "tool_calls":
                reason = "tool_use"
            case "length":
                full = self._fills_context
                reason = "model_context_window_exceeded" if full else "max_tokens"
            case _:
                reason = "end_turn" if sequence is None else "stop_sequence"
        return reason, sequence


def _usage(generation: Generation) -> MessageUsage:
    usage = generation.usage
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=MessageTokensDetails(
            usage.completion_tokens_details.reasoning_tokens
        ),
    )

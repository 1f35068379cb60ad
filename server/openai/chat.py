"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from engine.text.output import TextDelta, TokenLogprob
from server.access.caller import Caller
from server.openai.answer_reader import AnswerReader
from server.openai.best_of import Whole, answered
from server.openai.chat_parts import ChatParts
from server.openai.conversation import Conversation
from server.openai.endpoint import respond
from server.openai.generation import Choice, Step
from server.openai.inputs import ChatRequest
from server.openai.logprobs import chat_logprobs, prompt_logprobs
from server.openai.outputs import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    FinishReason,
    TextEvents,
    Usage,
    to_event,
)
from server.openai.schema import describe
from server.state import ServerState
from server.text.parts import Part, Text

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    summary="Continue a conversation",
    openapi_extra=describe(ChatRequest, ChatCompletion, chunk=ChatChunk),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, at once or as a stream of chunks."""
    return await respond(request, ChatRequest, ChatCall.prepare)


class ChatCall:
    """One request, ready to be submitted, in the shapes of this endpoint."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._body = conversation.body
        self._with_logprobs = bool(conversation.body.logprobs)
        # Whether each chunk tells more than its text, so that none can be made ahead.
        self._is_detailed = self._with_logprobs or bool(
            self._body.return_token_ids or self._body.continuous_usage
        )
        self._parts = ChatParts(
            conversation.reasoning_fields, as_function_call=bool(self._body.functions)
        )
        self._texts: dict[int, TextEvents] = {}  # by choice
        self._head: dict[str, Any] = {
            "id": conversation.id,
            "created": int(time.time()),
            "model": conversation.model.name,
            "system_fingerprint": conversation.model.info.fingerprint,
        }

    @classmethod
    async def prepare(cls, state: ServerState, caller: Caller, body: ChatRequest) -> ChatCall:
        """Judge the request against the model and encode its messages."""
        return cls(await Conversation.prepare(state, caller, body))

    async def complete(self) -> ChatCompletion:
        """The whole answer."""
        conversation = self._conversation
        with conversation.generation() as generation:
            wholes = [Whole(choice) for choice in generation.choices]
            parts: list[list[Part]] = [[] for _ in wholes]
            async for turns in conversation.turns(generation):
                for choice, gained, delta in turns:
                    wholes[choice.index].add(delta)
                    parts[choice.index] += gained
        first = generation.choices[0]
        wants_prompt = conversation.sampling.prompt_logprobs is not None
        return ChatCompletion(
            **self._head,
            choices=[
                ChatChoice(
                    index=whole.choice.index,
                    message=self._parts.message(
                        parts[whole.choice.index], echoed=self._body.echoed
                    ),
                    logprobs=self._logprobs(whole.entries),
                    finish_reason=self._finish_reason(whole.choice),
                    stop_reason=whole.choice.stop_reason,
                    token_ids=whole.token_ids if self._body.return_token_ids else UNSET,
                )
                for whole in answered(wholes, self._body.n or 1)
            ],
            usage=generation.usage,
            prompt_logprobs=prompt_logprobs(
                conversation.prompt, first.prompt_logprobs, conversation.model.tokenizer
            )
            if wants_prompt
            else UNSET,
            prompt_token_ids=conversation.prompt if self._body.return_token_ids else UNSET,
        )

    async def events(self) -> AsyncGenerator[bytes]:
        """The answer as server-sent events, without the closing ``[DONE]``."""
        conversation = self._conversation
        started: set[int] = set()
        with conversation.generation() as generation:
            readers = [conversation.reader(choice) for choice in generation.choices]
            async for step in generation.steps():
                usage = generation.usage if self._body.continuous_usage else None
                event = self._step_events(step, started, readers, usage)
                if event:
                    yield event
            if self._body.include_usage:
                yield to_event(ChatChunk(**self._head, choices=[], usage=generation.usage))

    def _step_events(
        self,
        step: Step,
        started: set[int],
        readers: Sequence[AnswerReader],
        usage: Usage | None,
    ) -> bytes:
        chunks: list[bytes] = []
        for choice, delta in step:
            if choice.index not in started:
                started.add(choice.index)
                chunks.append(to_event(self._opening(choice, usage)))
                if self._body.echoed:
                    content = Delta(content=self._body.echoed)
                    chunks.append(to_event(self._chunk(choice, content, usage)))
            reader = readers[choice.index]
            if not reader.is_plain:
                chunks += self._part_events(choice, delta, reader.read(delta), usage)
            elif delta.text or self._has_details(delta):
                chunks.append(self._content(choice, delta, usage))
            if delta.finished:
                chunks.append(to_event(self._chunk(choice, Delta(), usage, ends=True)))
        return b"".join(chunks)

    def _opening(self, choice: Choice, usage: Usage | None) -> ChatChunk:
        chunk = self._chunk(choice, Delta(role="assistant", content=""), usage)
        if self._body.return_token_ids:
            chunk.prompt_token_ids = self._conversation.prompt
        return chunk

    def _content(self, choice: Choice, delta: TextDelta, usage: Usage | None) -> bytes:
        if self._is_detailed:
            content = Delta(content=delta.text)
            return to_event(self._chunk(choice, content, usage, **self._details(delta)))
        return self._text_event(choice, delta.text)

    def _text_event(self, choice: Choice, text: str) -> bytes:
        events = self._texts.get(choice.index)
        if events is None:
            sample = self._chunk(choice, Delta(content=TextEvents.MARK))
            events = self._texts[choice.index] = TextEvents(sample)
        return events.event(text)

    def _part_events(
        self, choice: Choice, delta: TextDelta, parts: Sequence[Part], usage: Usage | None
    ) -> Iterator[bytes]:
        """A chunk for each thing that was gained; the first one carries what else is told."""
        if not self._is_detailed and len(parts) == 1 and isinstance(parts[0], Text):
            yield self._text_event(choice, parts[0].text)
            return
        deltas = self._parts.deltas(parts)
        details = self._details(delta)
        if not deltas and self._has_details(delta):
            deltas = [Delta()]
        for gained in deltas:
            yield to_event(self._chunk(choice, gained, usage, **details))
            details.clear()

    def _has_details(self, delta: TextDelta) -> bool:
        """Whether there is more to tell than text."""
        return bool(delta.logprobs or (self._body.return_token_ids and delta.token_ids))

    def _details(self, delta: TextDelta) -> dict[str, Any]:
        """What a chunk tells besides its text."""
        told: dict[str, Any] = {"logprobs": self._logprobs(delta.logprobs)}
        if self._body.return_token_ids:
            told["token_ids"] = list(delta.token_ids)
        return told

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        return chat_logprobs(entries, as_ids=bool(self._body.return_tokens_as_token_ids))

    def _chunk(
        self,
        choice: Choice,
        delta: Delta,
        usage: Usage | None = None,
        *,
        ends: bool = False,
        **more: Any,
    ) -> ChatChunk:
        if ends:
            more.update(finish_reason=self._finish_reason(choice), stop_reason=choice.stop_reason)
        part = ChatChunkChoice(index=choice.index, delta=delta, **more)
        return ChatChunk(
            **self._head, choices=[part], usage=usage if self._body.include_usage else UNSET
        )

    def _finish_reason(self, choice: Choice) -> FinishReason | None:
        if choice.finish_reason == "tool_calls" and self._body.functions:
            return "function_call"
        return choice.finish_reason

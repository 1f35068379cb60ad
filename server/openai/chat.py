"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from engine.text.output import TextDelta
from server.access.caller import Caller
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
    Delta,
    Message,
    TextEvents,
    to_event,
)
from server.openai.schema import describe
from server.state import ServerState

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    summary="Continue a conversation",
    openapi_extra=describe(ChatRequest, ChatCompletion, chunk=ChatChunk),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, at once or as a stream of chunks."""
    return await respond(request, ChatRequest, _ChatCall.prepare)


class _ChatCall:
    """One request, ready to be submitted, in the shapes of this endpoint."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._body = conversation.body
        self._with_logprobs = bool(conversation.body.logprobs)
        self._texts: dict[int, TextEvents] = {}  # by choice
        self._head: dict[str, Any] = {
            "id": conversation.id,
            "created": int(time.time()),
            "model": conversation.model.name,
            "system_fingerprint": conversation.model.info.fingerprint,
        }

    @classmethod
    async def prepare(cls, state: ServerState, caller: Caller, body: ChatRequest) -> _ChatCall:
        """Judge the request against the model and encode its messages."""
        return cls(await Conversation.prepare(state, caller, body))

    async def complete(self) -> ChatCompletion:
        """The whole answer."""
        conversation = self._conversation
        with conversation.generation() as generation:
            texts: list[list[str]] = [[] for _ in generation.choices]
            entries: list[list[Any]] = [[] for _ in generation.choices]
            async for step in generation.steps():
                for choice, delta in step:
                    texts[choice.index].append(delta.text)
                    entries[choice.index].extend(delta.logprobs)
        first = generation.choices[0]
        wants_prompt = conversation.sampling.prompt_logprobs is not None
        return ChatCompletion(
            **self._head,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=Message(content="".join(texts[choice.index])),
                    logprobs=chat_logprobs(entries[choice.index]) if self._with_logprobs else None,
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                )
                for choice in generation.choices
            ],
            usage=generation.usage,
            prompt_logprobs=prompt_logprobs(
                conversation.prompt, first.prompt_logprobs, conversation.model.tokenizer
            )
            if wants_prompt
            else UNSET,
        )

    async def events(self) -> AsyncGenerator[bytes]:
        """The answer as server-sent events, without the closing ``[DONE]``."""
        started: set[int] = set()
        with self._conversation.generation() as generation:
            async for step in generation.steps():
                event = self._step_events(step, started)
                if event:
                    yield event
            if self._body.include_usage:
                yield to_event(ChatChunk(**self._head, choices=[], usage=generation.usage))

    def _step_events(self, step: Step, started: set[int]) -> bytes:
        chunks: list[bytes] = []
        for choice, delta in step:
            if choice.index not in started:
                started.add(choice.index)
                opening = self._chunk(choice, Delta(role="assistant", content=""))
                chunks.append(to_event(opening))
            if delta.text or delta.logprobs:
                chunks.append(self._content(choice, delta))
            if delta.finished:
                chunks.append(to_event(self._chunk(choice, Delta(), ends=True)))
        return b"".join(chunks)

    def _content(self, choice: Choice, delta: TextDelta) -> bytes:
        if self._with_logprobs:
            logprobs = chat_logprobs(delta.logprobs)
            return to_event(self._chunk(choice, Delta(content=delta.text), logprobs=logprobs))
        events = self._texts.get(choice.index)
        if events is None:
            sample = self._chunk(choice, Delta(content=TextEvents.MARK))
            events = self._texts[choice.index] = TextEvents(sample)
        return events.event(delta.text)

    def _chunk(self, choice: Choice, delta: Delta, *, ends: bool = False, **more: Any) -> ChatChunk:
        if ends:
            more.update(finish_reason=choice.finish_reason, stop_reason=choice.stop_reason)
        part = ChatChunkChoice(index=choice.index, delta=delta, **more)
        usage = None if self._body.include_usage else UNSET
        return ChatChunk(**self._head, choices=[part], usage=usage)

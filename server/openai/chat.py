"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from types import MappingProxyType
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
from server.openai.generation import Choice, Generation, Step
from server.openai.inputs import ChatRequest
from server.openai.kept_chats import ChatKeeper
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
from server.openai.progress import progress_of
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
    """Answer a conversation, as one object or as a stream of chunks."""
    return await respond(request, ChatRequest, ChatCall.prepare)


class Gathered:
    """The output of all choices so far."""

    def __init__(self, generation: Generation) -> None:
        self.wholes = [Whole(choice) for choice in generation.choices]
        self.parts: list[list[Part]] = [[] for _ in self.wholes]  # by choice

    def add(self, choice: Choice, parts: Sequence[Part], delta: TextDelta) -> None:
        """Append the next delta of a choice."""
        self.wholes[choice.index].add(delta)
        self.parts[choice.index] += parts


class ChatCall:
    """One request, ready to be submitted, in this endpoint's shapes."""

    def __init__(self, conversation: Conversation, keeper: ChatKeeper | None = None) -> None:
        self._conversation = conversation
        self._keeper = keeper
        self._body = conversation.body
        self._with_logprobs = bool(conversation.body.logprobs)
        # Whether chunks carry more than text, so that none can be encoded ahead.
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
        if self._body.service_tier is not None:
            self._head["service_tier"] = "default"

    @classmethod
    async def prepare(cls, state: ServerState, caller: Caller, body: ChatRequest) -> ChatCall:
        """Validate the request against the model and encode its messages."""
        conversation = await Conversation.prepare(state, caller, body)
        if not body.store:
            return cls(conversation)
        database, sampling = state.database, conversation.sampling
        return cls(conversation, ChatKeeper(database, caller.tenant, body, sampling))

    async def complete(self) -> ChatCompletion:
        """The whole response."""
        conversation = self._conversation
        with conversation.generation() as generation:
            gathered = Gathered(generation)
            async for turns in conversation.turns(generation):
                for choice, gained, delta in turns:
                    gathered.add(choice, gained, delta)
        self._head["system_fingerprint"] = generation.fingerprint
        answer = self._answer(generation, gathered)
        if self._keeper is not None and not await self._keeper.keep(answer):
            answer.store = False
        return answer

    def _answer(self, generation: Generation, gathered: Gathered) -> ChatCompletion:
        parts = gathered.parts
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
                    **self._timings(whole.choice),
                )
                for whole in answered(gathered.wholes, self._body.n or 1)
            ],
            usage=generation.usage,
            **self._about_prompt(generation.choices[0]),
        )

    async def events(self) -> AsyncGenerator[bytes]:
        """The response as server-sent events, without the closing ``[DONE]``."""
        conversation = self._conversation
        started: set[int] = set()
        tells_usage = self._body.continuous_usage
        with conversation.generation() as generation:
            readers = [conversation.reader(choice) for choice in generation.choices]
            gathered = None if self._keeper is None else Gathered(generation)
            async for step in generation.steps():
                if not started:
                    self._head["system_fingerprint"] = generation.fingerprint
                usage = generation.usage if tells_usage else None
                event = self._step_events(step, started, readers, usage, gathered)
                if event:
                    yield event
        if self._keeper is not None and gathered is not None:  # before its client can look it up
            is_kept = await self._keeper.keep(self._answer(generation, gathered))
            if not is_kept:
                yield to_event(ChatChunk(**self._head, choices=[], store=False))
        if self._body.include_usage:
            yield to_event(ChatChunk(**self._head, choices=[], usage=generation.usage))

    def _step_events(
        self,
        step: Step,
        started: set[int],
        readers: Sequence[AnswerReader],
        usage: Usage | None,
        gathered: Gathered | None,
    ) -> bytes:
        chunks: list[bytes] = []
        for choice, delta in step:
            if (progress := progress_of(choice)) is not None:
                told = None if self._body.include_usage else UNSET
                chunk = ChatChunk(**self._head, choices=[], usage=told, prompt_progress=progress)
                chunks.append(to_event(chunk))
            if choice.index not in started:
                if not (delta.token_ids or delta.finished):
                    continue  # part of the prompt's logprobs; they are sent as a whole
                started.add(choice.index)
                chunks.append(to_event(self._opening(choice, usage)))
                if self._body.echoed:
                    content = Delta(content=self._body.echoed)
                    chunks.append(to_event(self._chunk(choice, content, usage)))
            reader = readers[choice.index]
            is_plain, parts = reader.is_plain, reader.read(delta)
            if gathered is not None:
                gathered.add(choice, parts, delta)
            if not is_plain:
                chunks += self._part_events(choice, delta, parts, usage)
            elif delta.text or self._has_details(delta):
                chunks.append(self._content(choice, delta, usage))
            if delta.finished:
                chunks.append(to_event(self._chunk(choice, Delta(), usage, ends=True)))
        return b"".join(chunks)

    def _opening(self, choice: Choice, usage: Usage | None) -> ChatChunk:
        about = self._about_prompt(choice)
        return self._chunk(choice, Delta(role="assistant", content=""), usage, about=about)

    def _about_prompt(self, choice: Choice) -> dict[str, Any]:
        """The requested fields about the prompt; its logprobs come with the first choice."""
        conversation, told = self._conversation, {}
        if conversation.sampling.prompt_logprobs is not None and choice.index == 0:
            tokenizer, logprobs = conversation.model.tokenizer, choice.prompt_logprobs
            told["prompt_logprobs"] = prompt_logprobs(conversation.prompt, logprobs, tokenizer)
        if self._body.return_token_ids:
            told["prompt_token_ids"] = conversation.prompt
        return told

    def _timings(self, choice: Choice) -> dict[str, Any]:
        return {"timings": choice.timings} if self._body.return_timings else {}

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
        """A chunk for each new part; the first one carries all other fields."""
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
        """Whether there is more to send than text."""
        return bool(delta.logprobs or (self._body.return_token_ids and delta.token_ids))

    def _details(self, delta: TextDelta) -> dict[str, Any]:
        """The fields of a chunk besides its text."""
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
        about: Mapping[str, Any] = MappingProxyType({}),
        **more: Any,
    ) -> ChatChunk:
        if ends:
            more.update(finish_reason=self._finish_reason(choice), stop_reason=choice.stop_reason)
            more.update(self._timings(choice))
        part = ChatChunkChoice(index=choice.index, delta=delta, **more)
        told = usage if self._body.include_usage else UNSET
        return ChatChunk(**self._head, choices=[part], usage=told, **about)

    def _finish_reason(self, choice: Choice) -> FinishReason | None:
        if choice.finish_reason == "tool_calls" and self._body.functions:
            return "function_call"
        return choice.finish_reason

"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from engine.text.output import TextDelta, TokenLogprob
from server.access.caller import Caller
from server.openai.best_of import ChoiceOutput, select_choices
from server.openai.chat_parts import ChatFormatter
from server.openai.chat_recorder import ChatRecorder
from server.openai.choice import Choice, Step
from server.openai.choice_parser import ChoiceParser
from server.openai.conversation import Conversation
from server.openai.endpoint import respond
from server.openai.generation import Generation
from server.openai.inputs import ChatRequest
from server.openai.large_answers import build_choices
from server.openai.logprobs import chat_logprobs, prompt_logprobs
from server.openai.openapi_schema import describe
from server.openai.outputs import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    FinishReason,
    TextEventTemplate,
    Usage,
    to_event,
)
from server.openai.progress import progress_of
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


class ChoiceCollector:
    """The output of all choices so far."""

    def __init__(self, generation: Generation) -> None:
        self.outputs = [ChoiceOutput(choice) for choice in generation.choices]
        self.parts: list[list[Part]] = [[] for _ in self.outputs]  # by choice

    def add(self, choice: Choice, parts: Sequence[Part], delta: TextDelta) -> None:
        """Append the next delta of a choice."""
        self.outputs[choice.index].add(delta)
        self.parts[choice.index] += parts


class ChatCall:
    """One request, ready to be submitted, in this endpoint's shapes."""

    def __init__(self, conversation: Conversation, recorder: ChatRecorder | None = None) -> None:
        self._conversation = conversation
        self._recorder = recorder
        self._body = conversation.body
        self._with_logprobs = bool(conversation.body.logprobs)
        # Whether chunks carry more than text, so that none can be encoded ahead.
        self._is_detailed = self._with_logprobs or bool(
            self._body.return_token_ids or self._body.continuous_usage
        )
        self._parts = ChatFormatter(
            conversation.reasoning_fields, as_function_call=bool(self._body.functions)
        )
        self._text_events: dict[int, TextEventTemplate] = {}  # by choice
        self._common_fields: dict[str, Any] = {
            "id": conversation.id,
            "created": int(time.time()),
            "model": conversation.model.name,
            "system_fingerprint": conversation.model.info.fingerprint,
        }
        if self._body.service_tier is not None:
            self._common_fields["service_tier"] = "default"

    @classmethod
    async def prepare(cls, state: ServerState, caller: Caller, body: ChatRequest) -> ChatCall:
        """Validate the request against the model and encode its messages."""
        conversation = await Conversation.prepare(state, caller, body)
        if not body.store:
            return cls(conversation)
        database, sampling = state.database, conversation.sampling
        return cls(conversation, ChatRecorder(database, caller.tenant, conversation.body, sampling))

    async def complete(self) -> ChatCompletion:
        """The whole response."""
        conversation = self._conversation
        with conversation.generation() as generation:
            gathered = ChoiceCollector(generation)
            async for turns in conversation.parsed_steps(generation):
                for choice, gained, delta in turns:
                    gathered.add(choice, gained, delta)
        self._common_fields["system_fingerprint"] = generation.fingerprint
        answer = await self._build_response(generation, gathered)
        if self._recorder is not None and not await self._recorder.save(answer):
            answer.store = False
        return answer

    async def _build_response(
        self, generation: Generation, gathered: ChoiceCollector
    ) -> ChatCompletion:
        def build(_: int, whole: ChoiceOutput) -> ChatChoice:
            return self._full_choice(whole, gathered.parts[whole.choice.index])

        return ChatCompletion(
            **self._common_fields,
            choices=await build_choices(build, select_choices(gathered.outputs, self._body.n or 1)),
            usage=generation.usage,
            **await self._all_prompt_fields(generation.choices[0]),
        )

    def _full_choice(self, whole: ChoiceOutput, parts: Sequence[Part]) -> ChatChoice:
        return ChatChoice(
            index=whole.choice.index,
            message=self._parts.message(
                parts,
                echoed=self._body.echoed,
                has_reasoned=whole.choice.num_reasoning_tokens > 0,
            ),
            logprobs=self._logprobs(whole.logprobs),
            finish_reason=self._finish_reason(whole.choice),
            stop_reason=whole.choice.stop_reason,
            token_ids=whole.token_ids if self._body.return_token_ids else UNSET,
            **self._timings(whole.choice),
        )

    async def events(self) -> AsyncGenerator[bytes]:
        """The response as server-sent events, without the closing ``[DONE]``."""
        conversation = self._conversation
        started: set[int] = set()
        tells_usage = self._body.continuous_usage
        with conversation.generation() as generation:
            readers = [conversation.parser(choice) for choice in generation.choices]
            gathered = None if self._recorder is None else ChoiceCollector(generation)
            async for step in generation.steps():
                if not started:
                    self._common_fields["system_fingerprint"] = generation.fingerprint
                usage = generation.usage if tells_usage else None
                event = self._step_events(step, started, readers, usage, gathered)
                if event:
                    yield event
        if self._recorder is not None and gathered is not None:  # before its client can look it up
            answer = await self._build_response(generation, gathered)
            is_kept = await self._recorder.save(answer)
            if not is_kept:
                yield to_event(ChatChunk(**self._common_fields, choices=[], store=False))
        if self._body.include_usage:
            yield to_event(ChatChunk(**self._common_fields, choices=[], usage=generation.usage))

    def _step_events(
        self,
        step: Step,
        started: set[int],
        readers: Sequence[ChoiceParser],
        usage: Usage | None,
        gathered: ChoiceCollector | None,
    ) -> bytes:
        chunks: list[bytes] = []
        for choice, delta in step:
            if (progress := progress_of(choice)) is not None:
                no_usage = None if self._body.include_usage else UNSET
                chunk = ChatChunk(
                    **self._common_fields, choices=[], usage=no_usage, prompt_progress=progress
                )
                chunks.append(to_event(chunk))
            if choice.index not in started:
                if not (delta.token_ids or delta.finished):
                    continue  # part of the prompt's logprobs; they are sent as a whole
                started.add(choice.index)
                chunks.append(to_event(self._first_chunk(choice, usage)))
                if self._body.echoed:
                    content = Delta(content=self._body.echoed)
                    chunks.append(to_event(self._chunk(choice, content, usage)))
            reader = readers[choice.index]
            is_plain, parts = reader.is_plain, reader.parse(delta)
            if gathered is not None:
                gathered.add(choice, parts, delta)
            if not is_plain:
                chunks += self._part_events(choice, delta, parts, usage)
            elif delta.text or self._has_details(delta):
                chunks.append(self._content_event(choice, delta, usage))
            if delta.finished:
                chunks.append(to_event(self._chunk(choice, Delta(), usage, is_last=True)))
        return b"".join(chunks)

    def _first_chunk(self, choice: Choice, usage: Usage | None) -> ChatChunk:
        about = self._prompt_fields(choice)
        return self._chunk(choice, Delta(role="assistant", content=""), usage, prompt_fields=about)

    async def _all_prompt_fields(self, choice: Choice) -> dict[str, Any]:
        if not choice.prompt_logprobs:
            return self._prompt_fields(choice)
        return await asyncio.to_thread(self._prompt_fields, choice)

    def _prompt_fields(self, choice: Choice) -> dict[str, Any]:
        """The requested fields about the prompt; its logprobs come with the first choice."""
        conversation, extra = self._conversation, {}
        if conversation.sampling.prompt_logprobs is not None and choice.index == 0:
            tokenizer, logprobs = conversation.model.tokenizer, choice.prompt_logprobs
            extra["prompt_logprobs"] = prompt_logprobs(conversation.prompt, logprobs, tokenizer)
        if self._body.return_token_ids:
            extra["prompt_token_ids"] = conversation.prompt
        return extra

    def _timings(self, choice: Choice) -> dict[str, Any]:
        return {"timings": choice.timings} if self._body.return_timings else {}

    def _content_event(self, choice: Choice, delta: TextDelta, usage: Usage | None) -> bytes:
        if self._is_detailed:
            content = Delta(content=delta.text)
            return to_event(self._chunk(choice, content, usage, **self._details(delta)))
        return self._text_event(choice, delta.text)

    def _text_event(self, choice: Choice, text: str) -> bytes:
        events = self._text_events.get(choice.index)
        if events is None:
            sample = self._chunk(choice, Delta(content=TextEventTemplate.MARK))
            events = self._text_events[choice.index] = TextEventTemplate(sample)
        return events.render(text)

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
        extra: dict[str, Any] = {"logprobs": self._logprobs(delta.logprobs)}
        if self._body.return_token_ids:
            extra["token_ids"] = list(delta.token_ids)
        return extra

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
        is_last: bool = False,
        prompt_fields: Mapping[str, Any] = MappingProxyType({}),
        **more: Any,
    ) -> ChatChunk:
        if is_last:
            more.update(finish_reason=self._finish_reason(choice), stop_reason=choice.stop_reason)
            more.update(self._timings(choice))
        part = ChatChunkChoice(index=choice.index, delta=delta, **more)
        shown_usage = usage if self._body.include_usage else UNSET
        return ChatChunk(**self._common_fields, choices=[part], usage=shown_usage, **prompt_fields)

    def _finish_reason(self, choice: Choice) -> FinishReason | None:
        if choice.finish_reason == "tool_calls" and self._body.functions:
            return "function_call"
        return choice.finish_reason

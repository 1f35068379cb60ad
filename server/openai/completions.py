"""POST /v1/completions: text that goes on where a prompt ends."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from engine.text.output import TokenLogprob, prompt_entries
from server.access.caller import Caller
from server.openai.endpoint import (
    check_length,
    encode_texts,
    new_id,
    respond,
)
from server.openai.generation import Choice, Generation, Job, Step
from server.openai.inputs import CompletionRequest, Prompt
from server.openai.logprobs import completion_logprobs, prompt_logprobs
from server.openai.outputs import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    TextEvents,
    to_event,
)
from server.openai.sampling import check_token_ids, completion_sampling
from server.openai.schema import describe
from server.state import Model, ServerState

router = APIRouter()


@router.post(
    "/v1/completions",
    summary="Continue prompts",
    openapi_extra=describe(CompletionRequest, Completion, chunk=Completion),
)
async def create_completion(request: Request) -> Response:
    """Continue one or more prompts, at once or as a stream of chunks."""
    return await respond(request, CompletionRequest, _CompletionCall.prepare)


class _CompletionCall:
    """One request, ready to be submitted."""

    def __init__(
        self,
        state: ServerState,
        caller: Caller,
        model: Model,
        body: CompletionRequest,
        jobs: Sequence[Job],
    ) -> None:
        self._state = state
        self._caller = caller
        self._model = model
        self._body = body
        self._jobs = jobs
        self._texts: dict[int, TextEvents] = {}  # by choice
        self._head: dict[str, Any] = {
            "id": new_id("cmpl"),
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.info.fingerprint,
        }

    @classmethod
    async def prepare(
        cls, state: ServerState, caller: Caller, body: CompletionRequest
    ) -> _CompletionCall:
        """Judge the request against the model and encode its prompts."""
        model = await state.model()
        model.check_name(body.model)
        prompts = await _encode(body, model)
        jobs: list[Job] = [
            (prompt, completion_sampling(body, len(prompt), model)) for prompt in prompts
        ]
        return cls(state, caller, model, body, jobs)

    def _generation(self) -> Generation:
        return Generation(
            self._state,
            self._model,
            self._head["id"],
            self._jobs,
            priority=self._body.priority or 0,
            cache_salt=self._body.cache_salt or "",
            caller=self._caller,
            continuation=True,
        )

    async def complete(self) -> Completion:
        """The whole answer."""
        with self._generation() as generation:
            texts: list[list[str]] = [[] for _ in generation.choices]
            entries: list[list[TokenLogprob]] = [[] for _ in generation.choices]
            async for step in generation.steps():
                for choice, delta in step:
                    texts[choice.index].append(delta.text)
                    entries[choice.index].extend(delta.logprobs)
        return Completion(
            **self._head,
            choices=[
                self._whole_choice(choice, "".join(texts[choice.index]), entries[choice.index])
                for choice in generation.choices
            ],
            usage=generation.usage,
        )

    def _whole_choice(
        self, choice: Choice, text: str, entries: list[TokenLogprob]
    ) -> CompletionChoice:
        prompt_text, prompt_tokens = self._echo(choice)
        told: Any = UNSET
        if self._body.prompt_logprobs is not None:
            ids = choice.request.prompt_token_ids
            told = prompt_logprobs(ids, choice.prompt_logprobs, self._model.tokenizer)
        return CompletionChoice(
            index=choice.index,
            text=prompt_text + text,
            logprobs=self._logprobs(prompt_tokens, entries, len(prompt_text)),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            prompt_logprobs=told,
        )

    async def events(self) -> AsyncGenerator[bytes]:
        """The answer as server-sent events, without the closing ``[DONE]``."""
        # Text given out so far by choice; a choice that is not there has not begun.
        offsets: dict[int, int] = {}
        with self._generation() as generation:
            async for step in generation.steps():
                event = self._step_events(step, offsets)
                if event:
                    yield event
            if self._body.include_usage:
                yield to_event(Completion(**self._head, choices=[], usage=generation.usage))

    def _step_events(self, step: Step, offsets: dict[int, int]) -> bytes:
        chunks: list[bytes] = []
        for choice, delta in step:
            begins = choice.index not in offsets
            if begins and not (delta.token_ids or delta.finished):
                continue  # a part of the prompt's logprobs; the echo comes as a whole
            text, tokens = self._echo(choice) if begins else ("", [])
            offset = offsets.setdefault(choice.index, len(text))
            text += delta.text
            if delta.finished or self._body.logprobs is not None:
                if text or tokens or delta.logprobs or delta.finished:
                    logprobs = self._logprobs(tokens, list(delta.logprobs), offset)
                    chunks.append(to_event(self._chunk(choice, text, logprobs, delta.finished)))
            elif text:
                chunks.append(self._text_event(choice, text))
        return b"".join(chunks)

    def _text_event(self, choice: Choice, text: str) -> bytes:
        events = self._texts.get(choice.index)
        if events is None:
            sample = self._chunk(choice, TextEvents.MARK, None, ends=False)
            events = self._texts[choice.index] = TextEvents(sample)
        return events.event(text)

    def _chunk(
        self, choice: Choice, text: str, logprobs: CompletionLogprobs | None, ends: bool
    ) -> Completion:
        part = CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=logprobs,
            finish_reason=choice.finish_reason if ends else None,
            stop_reason=choice.stop_reason if ends else UNSET,
        )
        usage = None if self._body.include_usage else UNSET
        return Completion(**self._head, choices=[part], usage=usage)

    def _echo(self, choice: Choice) -> tuple[str, list[TokenLogprob]]:
        """The prompt's text and tokens, where they are to be part of the answer."""
        body = self._body
        if not body.echo:
            return "", []
        tokenizer, ids = self._model.tokenizer, choice.request.prompt_token_ids
        skip = choice.request.sampling.skip_special_tokens
        given = body.prompt[choice.prompt_index]
        text = given if isinstance(given, str) else tokenizer.decode(ids, skip_special_tokens=skip)
        if body.logprobs is None:
            return text, []
        return text, prompt_entries(
            tokenizer, ids, choice.prompt_logprobs, skip_special_tokens=skip
        )

    def _logprobs(
        self, prompt: list[TokenLogprob], output: list[TokenLogprob], offset: int
    ) -> CompletionLogprobs | None:
        """Logprobs of a prompt's tokens and of output tokens whose text begins at ``offset``."""
        if self._body.logprobs is None:
            return None
        told = completion_logprobs(output, offset)
        if not prompt:
            return told
        before = completion_logprobs(prompt)
        return CompletionLogprobs(
            tokens=before.tokens + told.tokens,
            token_logprobs=before.token_logprobs + told.token_logprobs,
            top_logprobs=before.top_logprobs + told.top_logprobs,
            text_offset=before.text_offset + told.text_offset,
        )


async def _encode(body: CompletionRequest, model: Model) -> list[list[int]]:
    """Token ids of each prompt. Raises ApiError (400) for ids outside the vocabulary."""
    prompts: list[Prompt] = body.prompt
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not texts:
        encoded = [prompt for prompt in prompts if not isinstance(prompt, str)]
        for ids in encoded:
            check_token_ids(ids, model.info.vocab_size, "prompt")
        return encoded
    check_length(max(map(len, texts)), model, "prompt")
    wanted = body.add_special_tokens
    add_special = True if wanted is None else wanted
    return await encode_texts(model.tokenizer, texts, add_special_tokens=add_special)

"""POST /v1/completions: continuation of a prompt."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from engine.text.output import TokenLogprob, prompt_entries
from engine.types import SamplingParams
from server.access.caller import Caller
from server.openai.best_of import ChoiceOutput, select_choices
from server.openai.choice import Choice, Job, Step
from server.openai.endpoint import check_grammar, new_id, respond
from server.openai.generation import Generation
from server.openai.inputs import CompletionRequest
from server.openai.large_answers import build_choices
from server.openai.logprobs import completion_logprobs, prompt_logprobs
from server.openai.openapi_schema import describe
from server.openai.outputs import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    TextEventTemplate,
    Usage,
    to_event,
)
from server.openai.progress import progress_of
from server.openai.prompts import encode_prompts, infill_of, truncate_prompt
from server.openai.sampling import DEFAULT_COMPLETION_TOKENS, completion_sampling, encode_bad_words
from server.state import Model, ServerState

router = APIRouter()


@router.post(
    "/v1/completions",
    summary="Continue prompts",
    openapi_extra=describe(CompletionRequest, Completion, chunk=Completion),
)
async def create_completion(request: Request) -> Response:
    """Continue one or more prompts, as one object or as a stream of chunks."""
    return await respond(request, CompletionRequest, CompletionCall.prepare)


class CompletionCall:
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
        self._text_events: dict[int, TextEventTemplate] = {}  # by choice
        # Whether chunks carry more than text, so that none can be encoded ahead.
        self._is_detailed = bool(
            body.logprobs is not None
            or body.prompt_logprobs is not None
            or body.return_token_ids
            or body.continuous_usage
        )
        self._common_fields: dict[str, Any] = {
            "id": new_id("cmpl"),
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.info.fingerprint,
        }

    @classmethod
    async def prepare(
        cls, state: ServerState, caller: Caller, body: CompletionRequest
    ) -> CompletionCall:
        """Validate the request against the model and encode its prompts."""
        model = await state.get_model(body.model)
        model.check_generates()
        ends = infill_of(model).stop_token_ids if body.suffix else ()
        prompts: list[list[int]] = []
        samplings: list[SamplingParams] = []
        for whole in await encode_prompts(body, model):
            limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
            prompt = truncate_prompt(whole, body, limit, model.info)
            sampling = completion_sampling(body, len(prompt), model, stop_token_ids=ends)
            prompts.append(prompt)
            samplings.append(sampling)
        samplings = await encode_bad_words(samplings, model)
        await check_grammar(state, body)
        return cls(state, caller, model, body, list(map(Job, prompts, samplings)))

    def _generation(self) -> Generation:
        return Generation(
            self._state,
            self._model,
            self._common_fields["id"],
            self._jobs,
            priority=self._body.priority or 0,
            cache_salt=self._body.cache_salt or "",
            caller=self._caller,
            continuation=True,
            report_progress=self._body.reports_progress,
            beams=self._body.beams,
            count_param=self._body.count_param,
        )

    async def complete(self) -> Completion:
        """The whole response."""
        with self._generation() as generation:
            wholes = [ChoiceOutput(choice) for choice in generation.choices]
            async for step in generation.steps():
                for choice, delta in step:
                    wholes[choice.index].add(delta)
        self._common_fields["system_fingerprint"] = generation.fingerprint
        wholes = select_choices(wholes, self._body.n or 1, by_likelihood=self._body.uses_best_of)
        return Completion(
            **self._common_fields,
            choices=await build_choices(self._full_choice, wholes),
            usage=generation.usage,
        )

    def _full_choice(self, index: int, whole: ChoiceOutput) -> CompletionChoice:
        choice = whole.choice
        prompt_text, prompt_tokens = self._echo(choice)
        return CompletionChoice(
            index=index,
            text=prompt_text + whole.text,
            logprobs=self._logprobs(prompt_tokens, whole.logprobs, len(prompt_text)),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            **self._timings(choice),
            **self._extra_fields(choice, whole.token_ids, is_first=True),
        )

    async def events(self) -> AsyncGenerator[bytes]:
        """The response as server-sent events, without the closing ``[DONE]``."""
        # The length of the echoed prompt, by choice; a choice that has not begun is absent.
        offsets: dict[int, int] = {}
        tells_usage = self._body.continuous_usage
        with self._generation() as generation:
            async for step in generation.steps():
                if not offsets:
                    self._common_fields["system_fingerprint"] = generation.fingerprint
                usage = generation.usage if tells_usage else None
                event = self._step_events(step, offsets, usage)
                if event:
                    yield event
            if self._body.include_usage:
                yield to_event(
                    Completion(**self._common_fields, choices=[], usage=generation.usage)
                )

    def _step_events(self, step: Step, offsets: dict[int, int], usage: Usage | None) -> bytes:
        chunks: list[bytes] = []
        for choice, delta in step:
            if (progress := progress_of(choice)) is not None:
                no_usage = None if self._body.include_usage else UNSET
                chunk = Completion(
                    **self._common_fields, choices=[], usage=no_usage, prompt_progress=progress
                )
                chunks.append(to_event(chunk))
            begins = choice.index not in offsets
            if begins and not (delta.token_ids or delta.finished):
                continue  # part of the prompt's logprobs; the echo is sent as a whole
            text, tokens = self._echo(choice) if begins else ("", [])
            offset = offsets.setdefault(choice.index, len(text))
            text += delta.text
            if delta.finished or self._is_detailed:
                about = self._extra_fields(choice, delta.token_ids, is_first=begins)
                if text or tokens or about or delta.logprobs or delta.finished:
                    logprobs = self._logprobs(tokens, list(delta.logprobs), offset)
                    chunk = self._chunk(choice, text, logprobs, is_last=delta.finished, **about)
                    if usage is not None:
                        chunk.usage = usage
                    chunks.append(to_event(chunk))
            elif text:
                chunks.append(self._text_event(choice, text))
        return b"".join(chunks)

    def _text_event(self, choice: Choice, text: str) -> bytes:
        events = self._text_events.get(choice.index)
        if events is None:
            sample = self._chunk(choice, TextEventTemplate.MARK, None, is_last=False)
            events = self._text_events[choice.index] = TextEventTemplate(sample)
        return events.render(text)

    def _extra_fields(
        self, choice: Choice, token_ids: Sequence[int], *, is_first: bool
    ) -> dict[str, Any]:
        """The requested fields about a choice's prompt and token ids, for the whole or a chunk."""
        extra: dict[str, Any] = {}
        prompt = choice.request.prompt_token_ids
        if is_first and self._body.prompt_logprobs is not None:
            tokenizer = self._model.tokenizer
            extra["prompt_logprobs"] = prompt_logprobs(prompt, choice.prompt_logprobs, tokenizer)
        if self._body.return_token_ids and (is_first or token_ids):
            extra["token_ids"] = list(token_ids)
        if self._body.return_token_ids and is_first:
            extra["prompt_token_ids"] = list(prompt)
        return extra

    def _timings(self, choice: Choice) -> dict[str, Any]:
        return {"timings": choice.timings} if self._body.return_timings else {}

    def _chunk(
        self,
        choice: Choice,
        text: str,
        logprobs: CompletionLogprobs | None,
        *,
        is_last: bool,
        **more: Any,
    ) -> Completion:
        if is_last:
            more |= self._timings(choice)
        part = CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=logprobs,
            finish_reason=choice.finish_reason if is_last else None,
            stop_reason=choice.stop_reason if is_last else UNSET,
            **more,
        )
        usage = None if self._body.include_usage else UNSET
        return Completion(**self._common_fields, choices=[part], usage=usage)

    def _echo(self, choice: Choice) -> tuple[str, list[TokenLogprob]]:
        """The prompt's text and tokens if the response is to echo them."""
        body = self._body
        if not body.echo:
            return "", []
        tokenizer, ids = self._model.tokenizer, choice.request.prompt_token_ids
        skip = choice.request.sampling.skip_special_tokens
        given = body.prompt[choice.prompt_index]
        if isinstance(given, str) and body.truncate_prompt_tokens is None:
            text = given
        else:
            text = tokenizer.decode(ids, skip_special_tokens=skip)
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
        as_ids = bool(self._body.return_tokens_as_token_ids)
        logprobs = completion_logprobs(output, offset, as_ids=as_ids)
        if not prompt:
            return logprobs
        before = completion_logprobs(prompt, as_ids=as_ids)
        return CompletionLogprobs(
            tokens=before.tokens + logprobs.tokens,
            token_logprobs=before.token_logprobs + logprobs.token_logprobs,
            top_logprobs=before.top_logprobs + logprobs.top_logprobs,
            text_offset=before.text_offset + logprobs.text_offset,
        )

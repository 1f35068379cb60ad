"""A chat request, from validation to the parsed parts of its choices.

All endpoints that continue a conversation share it: they translate their body into a
``ChatRequest``, and the parts into their own shapes.

    conversation = await Conversation.prepare(state, caller, body)
    with conversation.generation() as generation:
        async for turns in conversation.parsed_steps(generation):
            for choice, parts, delta in turns: ...
    generation.choices[0].finish_reason, generation.usage
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import msgspec

from engine.audio.types import AudioClip
from engine.errors import ContextLengthExceeded, InvalidParameter
from engine.images.types import Image
from engine.text.output import TextDelta
from engine.types import Grammar, SamplingParams
from server.access.caller import Caller
from server.errors import bad_field
from server.openai.chat_prompt import encode_chat
from server.openai.choice import Choice, Job
from server.openai.choice_parser import ChoiceParser
from server.openai.endpoint import check_grammar, new_id
from server.openai.generation import Generation
from server.openai.inputs import ChatRequest
from server.openai.message_files import with_file_texts
from server.openai.prompts import truncate_prompt
from server.openai.sampling import chat_sampling, encode_bad_words
from server.openai.thinking import Thinking, may_think, thinking_kwargs, thinking_of
from server.openai.tool_use import ToolUse
from server.settings import ReasoningFields
from server.state import Model, ServerState
from server.text.answer_grammar import AnswerRules
from server.text.enforceable import UnenforceableSchema
from server.text.parts import Part


class ParsedDelta(NamedTuple):
    """The new parts of one choice in a step."""

    choice: Choice
    parts: list[Part]
    delta: TextDelta  # the tokens, logprobs and finish reason behind the parts


class Conversation:
    """A chat request that has been validated and encoded, ready to be submitted once."""

    def __init__(
        self,
        state: ServerState,
        caller: Caller,
        model: Model,
        body: ChatRequest,
        prompt: list[int],
        images: tuple[Image, ...],
        audio: tuple[AudioClip, ...],
        sampling: SamplingParams,
        tools: ToolUse | None,
        thinking: Thinking,
        id: str,
    ) -> None:
        self._state = state
        self._caller = caller
        self.model = model
        self.body = body
        self.prompt = prompt  # token ids
        self._images = images  # of the prompt
        self._audio = audio
        self.sampling = sampling
        self.id = id
        self._tools = tools
        self._is_thinking = thinking == "open"
        answers = model.answer_format
        marks = set() if tools is None else set(tools.dialect.markers)
        if answers.reasoning is not None:
            marks |= set(answers.reasoning.markers)
        # Special tokens are left out of texts, but the parser must see these.
        self._hidden = {mark: id_ for mark, id_ in answers.special_ids.items() if mark in marks}
        shown = set(self._hidden.values())
        if tools is not None and tools.dialect.token in answers.special_ids:
            shown.add(answers.special_ids[tools.dialect.token])
        self._shown_special_ids = frozenset(shown)

    @classmethod
    async def prepare(
        cls,
        state: ServerState,
        caller: Caller,
        body: ChatRequest,
        *,
        id: str | None = None,
        suffix: str = "",
    ) -> Conversation:
        """Validate a request against the model and encode its messages.

        Args:
            state: the application's.
            caller: who sent the request.
            body: the request, or another endpoint's in its shape; ``stream`` selects whether tool
                calls are returned incrementally or whole.
            id: the response's id, unique; by default one of the form ``chatcmpl-...``.
            suffix: follows the rendered conversation; may spell special tokens.

        Raises:
            ApiError: the request cannot be served as sent, or nothing can be served.
            RequestError: the same, found by the engine's own rules.
        """
        model = await state.get_model(body.model)
        model.check_generates()
        body = await with_file_texts(state.files, caller, body)
        tools = ToolUse.of(body, model.answer_format)
        whole, images, audio = await encode_chat(
            state,
            model,
            body,
            tools=[] if tools is None else tools.for_template(),
            template_kwargs=thinking_kwargs(body.reasoning_effort),
            add_special_tokens=bool(body.add_special_tokens),
            suffix=suffix,
        )
        prompt = truncate_prompt(whole, body, body.output_limit or 1, model.info)
        wanted = chat_sampling(body, len(prompt), model)
        (sampling,) = await encode_bad_words([wanted], model)
        await check_grammar(state, body)
        if tools is not None:
            await tools.check_patterns(state.grammars)
        thinking = thinking_of(model, body, prompt)
        asked = (model, body, sampling.grammar, tools, thinking)
        if tools is not None and tools.holds_schemas:  # of any number and size
            grammar = await asyncio.to_thread(_output_grammar, *asked)
        else:
            grammar = _output_grammar(*asked)
        if grammar is not None and grammar is not sampling.grammar:
            # The request's own grammar was checked already; here the tools' schemas are.
            param = "response_format" if tools is None else tools.field
            await state.grammars.check(grammar, param=param)
            sampling = msgspec.structs.replace(sampling, grammar=grammar)
        return cls(
            state,
            caller,
            model,
            body,
            prompt,
            images,
            audio,
            sampling,
            tools,
            thinking,
            id or new_id("chatcmpl"),
        )

    @property
    def num_audio_tokens(self) -> int:
        """How many of the prompt's tokens are audio."""
        return sum(clip.num_tokens for clip in self._audio)

    @contextlib.contextmanager
    def generation(self) -> Iterator[Generation]:
        """Submit the sequences; they have ended when the block exits.

        Raises what ``Generation`` raises; an error about the prompt names ``messages``.
        """
        try:
            with Generation(
                self._state,
                self.model,
                self.id,
                [Job(self.prompt, self.sampling, self._images, self._audio)],
                priority=self.body.priority or 0,
                cache_salt=self.body.cache_salt or "",
                caller=self._caller,
                shown_special_ids=self._shown_special_ids,
                report_progress=self.body.reports_progress,
                beams=self.body.beams,
                count_param=self.body.count_param,
            ) as generation:
                yield generation
        except ContextLengthExceeded as error:
            # The engine speaks of a prompt; a chat client sent messages.
            raise ContextLengthExceeded(error.message, param="messages") from None

    @property
    def reasoning_fields(self) -> ReasoningFields:
        """The field names for reasoning, for endpoints that have no name of their own for it."""
        return self._state.settings.reasoning_fields

    def parser(self, choice: Choice) -> ChoiceParser:
        """The parser of one choice's deltas, from the first one on."""
        tools = self._tools
        return ChoiceParser(
            choice,
            self.model.tokenizer,
            reasoning=self.model.answer_format.reasoning,
            is_thinking=self._is_thinking,
            dialect=None if tools is None else tools.dialect,
            schemas={} if tools is None else tools.schemas,
            custom_tools=frozenset() if tools is None else tools.custom_names,
            hidden=self._hidden,
            shown_special_ids=self._shown_special_ids,
            buffer_calls=not self.body.stream,
            include_reasoning=self.body.include_reasoning is not False,
            is_forced=tools is not None and tools.is_required,
        )

    async def parsed_steps(self, generation: Generation) -> AsyncIterator[list[ParsedDelta]]:
        """Yield the new parts of the choices as they arrive, until all have ended.

        Raises what ``Generation.steps`` raises.
        """
        readers = [self.parser(choice) for choice in generation.choices]
        async for step in generation.steps():
            yield [
                ParsedDelta(choice, readers[choice.index].parse(delta), delta)
                for choice, delta in step
            ]


def _output_grammar(
    model: Model,
    body: ChatRequest,
    content: Grammar | None,
    tools: ToolUse | None,
    thinking: Thinking,
) -> Grammar | None:
    """The grammar that constrains the output; ``content`` is the request's own grammar.

    Raises:
        ApiError: 400, a tool's schema cannot be enforced.
    """
    answers = model.answer_format
    rules = AnswerRules(
        content=content,
        dialect=None if tools is None else tools.dialect,
        tools=[] if tools is None else tools.to_grammar_tools(),
        is_required=tools is not None and tools.is_required,
        is_parallel=tools is None or tools.is_parallel,
        reasoning=answers.reasoning if may_think(model, body, thinking) else None,
        is_thinking=thinking == "open",
        channels=None if answers.reasoning is None else answers.reasoning.channels,
        special_ids=answers.special_ids,
    )
    try:
        return rules.grammar()
    except (UnenforceableSchema, InvalidParameter) as error:
        raise bad_field("tools" if tools is None else tools.field, str(error)) from None

"""A chat request from its judgement to the parts of its answers.

All endpoints that continue a conversation share it: they translate their body into a
``ChatRequest``, and the parts into their own shapes.

    conversation = await Conversation.prepare(state, caller, body)
    with conversation.generation() as generation:
        async for turns in conversation.turns(generation):
            for choice, parts, delta in turns: ...
    generation.choices[0].finish_reason, generation.usage
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

from engine.errors import ContextLengthExceeded
from engine.text.output import TextDelta
from engine.types import SamplingParams
from server.access.caller import Caller
from server.openai.endpoint import check_length, encode_chat, new_id
from server.openai.generation import Choice, Generation
from server.openai.inputs import ChatRequest
from server.openai.prompts import cut_prompt
from server.openai.sampling import chat_sampling
from server.state import Model, ServerState
from server.text.parts import Part, Text


class Turn(NamedTuple):
    """What one choice gained in a step."""

    choice: Choice
    parts: list[Part]
    delta: TextDelta  # the tokens and logprobs behind the parts, and the end


class Conversation:
    """A chat request that has been judged and encoded, ready to be submitted once."""

    def __init__(
        self,
        state: ServerState,
        caller: Caller,
        model: Model,
        body: ChatRequest,
        prompt: list[int],
        sampling: SamplingParams,
        id: str,
    ) -> None:
        self._state = state
        self._caller = caller
        self.model = model
        self.body = body
        self.prompt = prompt  # token ids
        self.sampling = sampling
        self.id = id

    @classmethod
    async def prepare(
        cls, state: ServerState, caller: Caller, body: ChatRequest, *, id: str | None = None
    ) -> Conversation:
        """Judge a request against the model and encode its messages.

        Args:
            state: the application's.
            caller: whose request it is.
            body: the request, or another endpoint's in its shape.
            id: the answer's id, unique; one of the form ``chatcmpl-...`` when left out.

        Raises:
            ApiError: the request cannot be served as it was sent, or nothing can be served.
            RequestError: as before, found by the engine's own rules.
        """
        model = await state.model()
        model.check_name(body.model)
        check_length(sum(len(m.content or "") for m in body.messages), model, "messages")
        whole = await encode_chat(model, body)
        if body.add_special_tokens:
            whole = model.tokenizer.encode("") + whole
        prompt = cut_prompt(whole, body, body.output_limit or 1, model.info)
        sampling = chat_sampling(body, len(prompt), model)
        return cls(state, caller, model, body, prompt, sampling, id or new_id("chatcmpl"))

    @contextlib.contextmanager
    def generation(self) -> Iterator[Generation]:
        """The sequences that answer; they have ended when the block is left.

        Raises what ``Generation`` raises; an error about the prompt names ``messages``.
        """
        try:
            with Generation(
                self._state,
                self.model,
                self.id,
                [(self.prompt, self.sampling)],
                priority=self.body.priority or 0,
                cache_salt=self.body.cache_salt or "",
                caller=self._caller,
            ) as generation:
                yield generation
        except ContextLengthExceeded as error:
            # The engine knows a prompt; a chat client sent messages.
            raise ContextLengthExceeded(error.message, param="messages") from None

    @property
    def is_plain(self) -> bool:
        """Whether every text is content as it stands, so that ``Generation.steps`` tells all."""
        return True

    async def turns(self, generation: Generation) -> AsyncIterator[list[Turn]]:
        """What the choices gained, as it comes, until all have ended.

        Raises what ``Generation.steps`` raises.
        """
        async for step in generation.steps():
            yield [
                Turn(choice, [Text(delta.text)] if delta.text else [], delta)
                for choice, delta in step
            ]

"""The shapes of responses, encoded by msgspec. Keys are those of the OpenAI specification.

Extras: ``stop_reason`` (the stop string or stop token id behind a finish reason) and, on request,
``prompt_logprobs``, ``prompt_token_ids`` and ``token_ids``.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from server.openai.timings import Timings

FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class PromptTokensDetails(Struct):
    """Part of ``usage``."""

    cached_tokens: int = 0


class CompletionTokensDetails(Struct):
    """Part of ``usage``.

    Draft tokens are reported if there were any; rejected ones are not completion tokens.
    """

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct):
    """Tokens read and generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(Struct, gc=False):  # a long answer has a million
    """A likely token at a position; ``bytes`` are its own, even if it is part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, gc=False):
    """A token of a chat response."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """The tokens of a chat response's content."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    """The tokens of a completion, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct):
    """A candidate token at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class FunctionCall(Struct):
    """The function and its arguments, which are JSON text."""

    name: str
    arguments: str


class ToolCall(Struct, tag_field="type", tag="function", kw_only=True):
    """A call of a function."""

    id: str
    function: FunctionCall


class CustomCall(Struct):
    """The custom tool and its input, which is a text."""

    name: str
    input: str


class CustomToolCall(Struct, tag_field="type", tag="custom", kw_only=True):
    """A call of a custom tool."""

    id: str
    custom: CustomCall


class ChatMessage(Struct, kw_only=True):
    """A chat response's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall | CustomToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChoice(Struct):
    """One continuation of a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class PromptProgressReport(Struct, kw_only=True):
    """Progress of a prompt, by llama.cpp's names; ``processed`` of ``total`` tokens are done."""

    index: int  # of the request's prompts
    total: int
    cache: int  # tokens found in the cache, included in processed
    processed: int
    time_ms: int  # since its first step
    queue_position: int | None  # requests ahead of it; null once it no longer waits


class ChatCompletion(Struct, kw_only=True):
    """The response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    store: Literal[False] | UnsetType = UNSET
    service_tier: Literal["default"] | UnsetType = UNSET  # if the request names one


class CompletionChoice(Struct, kw_only=True):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """The response of /v1/completions; on a stream, each of its chunks."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    prompt_progress: PromptProgressReport | UnsetType = UNSET  # in a chunk of its own


class FunctionCallDelta(Struct, omit_defaults=True):
    """A chunk's addition to a call: the first has the name, the others pieces of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CustomCallDelta(Struct, omit_defaults=True):
    """A chunk's addition to a call of a custom tool, as of a function's."""

    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ToolCallDelta(Struct, kw_only=True):
    """A chunk's addition to a call; the first alone has more than ``index`` and arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionCallDelta | UnsetType = UNSET
    custom: CustomCallDelta | UnsetType = UNSET


class Delta(Struct, omit_defaults=True):
    """A chunk's addition to a chat response's message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: FunctionCallDelta | None = None


class ChatChunkChoice(Struct):
    """One choice's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    store: Literal[False] | UnsetType = UNSET
    service_tier: Literal["default"] | UnsetType = UNSET
    prompt_progress: PromptProgressReport | UnsetType = UNSET


class ModelCard(Struct, kw_only=True):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    max_model_len: int
    root: str
    parent: str | None = None  # of an adapter: its base model
    owned_by: str = "quire"


class ModelList(Struct, kw_only=True):
    """The response of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(Struct):
    """The response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Struct):
    """The response of /detokenize."""

    prompt: str


_encode = msgspec.json.Encoder().encode


def to_json(value: Any) -> bytes:
    """``value`` as compact UTF-8 JSON."""
    return _encode(value)


class TextEventTemplate:
    """Events that differ in one text only: everything else is encoded once.

    Args:
        sample: the event's JSON with ``MARK`` in place of the text.
    """

    MARK = "\0text\0"

    def __init__(self, sample: Any) -> None:
        self._head, self._tail = to_event(sample).split(_encode(self.MARK))

    def render(self, text: str) -> bytes:
        """The event that carries ``text``."""
        return b"%b%b%b" % (self._head, _encode(text), self._tail)


def to_event(value: Any) -> bytes:
    """``value`` as one server-sent event. JSON has no newlines, so one ``data:`` line suffices."""
    return b"data: %b\n\n" % _encode(value)

"""The bodies of chats, completions and tokenisation, validated once on arrival.

Pydantic checks types (strictly: ``"5"`` and ``true`` are not integers) and what only the API knows;
``SamplingParams`` itself checks the ranges of sampling values. Unknown fields are accepted, kept in
``model_extra`` and reported: see ``unsupported.py``, and ``unread_fields.py`` for messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from server.openai.api_model import MAX_MODEL_NAME, ApiModel, FeatureRequest, ModelRequest
from server.openai.content import media_kind
from server.openai.extra_fields import ExtraFields
from server.openai.media_io import MediaIo
from server.openai.messages import Message, kind_of_message
from server.openai.metadata import Metadata
from server.openai.structured import StructuredFields
from server.openai.tool_fields import ToolFields, Tools
from server.openai.unread_fields import unread_fields
from server.openai.unsupported import ignored_params

_MAX_LABEL = 512
_MAX_STOPS = 4
_MAX_BAD_WORDS = 256
_MAX_STOP_CHARS = 4096
_MAX_SALT = 128
_MAX_BEST_OF = 20
_UNSUPPORTED_WITH_MEDIA = ("truncate_prompt_tokens", "use_beam_search")

# The tiers that clients may name; there is only one here, "default".
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]

Prompt = str | list[int]


def _read_stop(value: Any) -> list[str]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > _MAX_STOPS:
        raise ValueError(f"must hold at most {_MAX_STOPS} strings")
    if not all(0 < len(stop) <= _MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"must hold strings of 1 to {_MAX_STOP_CHARS} characters")
    return stops


def _read_prompts(value: Any) -> list[Prompt]:
    """Parse one prompt or several, as text or token ids, into a list of prompts."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, or one or more lists of token ids")
    kinds = set(map(type, value))
    if kinds == {int}:
        value, kinds = [value], {list}
    if kinds == {str}:
        if not all(value):
            raise ValueError("must not be empty")
    elif kinds == {list}:
        for ids in value:
            if not ids:
                raise ValueError("must not be empty")
            if set(map(type, ids)) != {int}:
                raise ValueError("must hold integers as token ids")
    else:
        raise ValueError("must not mix kinds, and must hold integers as token ids")
    return value


def _check_salt(value: str) -> str:
    if not 0 < len(value) <= _MAX_SALT or "\0" in value:
        raise ValueError(f"must be 1 to {_MAX_SALT} characters without NUL")
    return value


_STRINGS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPTS = {"anyOf": [*_STRINGS["anyOf"], _IDS, {"type": "array", "items": _IDS}]}
Stop = Annotated[list[str], PlainValidator(_read_stop), WithJsonSchema(_STRINGS)]
Prompts = Annotated[list[Prompt], PlainValidator(_read_prompts), WithJsonSchema(_PROMPTS)]
Salt = Annotated[str, AfterValidator(_check_salt)]
Label = Annotated[str, Field(max_length=_MAX_LABEL)]  # no effect
Verbosity = Literal["low", "medium", "high"]


class StreamOptions(ApiModel):
    """What a stream carries besides its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # no padding is added
    continuous_usage_stats: bool | None = None
    include_progress: bool | None = None


class GenerationRequest(ModelRequest, StructuredFields, ExtraFields):
    """The fields of both generation endpoints. None means the default of ``SamplingParams``."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Stop = Field(default=[])
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1)] | None = None
    bad_words: Annotated[list[str], Field(max_length=_MAX_BAD_WORDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: Metadata | None = None
    cache_salt: Salt | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: is only allowed when 'stream' is true")
        return self

    def ignored(self) -> list[str]:
        """As above, including those of ``stream_options``."""
        options = None if self.stream_options is None else self.stream_options.model_extra
        named = ignored_params(options, prefix="stream_options.")
        if self.stream_options and self.stream_options.include_obfuscation:
            named.append("stream_options.include_obfuscation")
        if self.stream_options and self.stream_options.continuous_usage_stats:
            named += [] if self.include_usage else ["stream_options.continuous_usage_stats"]
        return super().ignored() + named + self.ignored_options() + self.ignored_extra_fields()

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream carries the usage so far, not only the last."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    @property
    def reports_progress(self) -> bool:
        """Whether a stream reports the progress of prefill."""
        asked = self.stream_options is not None and self.stream_options.include_progress
        return bool(self.stream and (self.return_progress or asked))


class TemplateFields(BaseModel):
    """How a conversation is shown to the model.

    A mixin: strictness and parsing are those of the shape it is mixed into.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: MediaIo = None

    @model_validator(mode="after")
    def _check_ending(self) -> Self:
        if self.add_generation_prompt and self.continues_answer:
            raise ValueError("continue_final_message: excludes 'add_generation_prompt'")
        return self

    @property
    def continues_answer(self) -> bool:
        """Whether the answer continues the last message; its ``prefix`` asks for that too."""
        messages = getattr(self, "messages", None)
        return bool(self.continue_final_message or (messages and messages[-1].prefix))


class ChatRequest(GenerationRequest, ToolFields, TemplateFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    store: bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    service_tier: ServiceTier | None = None
    verbosity: Verbosity | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: is only allowed when 'logprobs' is true")
        kind = next(filter(None, (media_kind(message.content) for message in self.messages)), None)
        for field in _UNSUPPORTED_WITH_MEDIA:
            if kind and getattr(self, field):
                raise ValueError(f"{field}: is not available with {kind}")
        for field in ("max_tokens", "max_completion_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field}: must be at least 1")
        return self

    def ignored(self) -> list[str]:
        """As above, including those of the tools and images."""
        names = super().ignored() + self.ignored_tool_fields()
        for index, message in enumerate(self.messages):
            for place, image in message.images.items():
                if image.detail not in (None, "auto"):
                    names.append(f"messages.{index}.content.{place}.image_url.detail")
        begun = (index for index, message in enumerate(self.messages[:-1]) if message.prefix)
        names += [f"messages.{index}.prefix" for index in begun]
        idle = {
            "verbosity": self.verbosity in ("low", "high"),
            "service_tier": self.service_tier not in (None, "auto", "default"),
            "echo": self.echo and self.messages[-1].role != "assistant",
        }
        return names + [name for name, is_idle in idle.items() if is_idle]

    @classmethod
    def unread(cls, body: Mapping[str, Any]) -> list[str]:
        """As above, of the messages."""
        return unread_fields(body["messages"], kind_of_message, "messages")

    @property
    def output_limit(self) -> int | None:
        """The limit of output tokens, if the request sets one."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def echoed(self) -> str:
        """The beginning of the answer: the assistant's last message, if the request echoes it."""
        last = self.messages[-1]
        return (last.text or "") if self.echo and last.role == "assistant" else ""


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompts
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=_MAX_BEST_OF)] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError("best_of: must be at least 'n'")
        if self.uses_best_of and self.stream:
            raise ValueError("best_of: above 'n' is not available on a stream")
        if self.suffix and self.echo:
            raise ValueError("echo: is not available with 'suffix'")
        if self.use_beam_search and self.echo and self.logprobs is not None:
            raise ValueError("logprobs: of the prompt are not available with 'use_beam_search'")
        return self

    @property
    def uses_best_of(self) -> bool:
        """Whether more continuations are sampled than are returned."""
        return self.best_of is not None and self.best_of > (self.n or 1)


class TokenizeRequest(FeatureRequest, TemplateFields):
    """POST /tokenize: a text, or a conversation."""

    model: Annotated[str, Field(max_length=MAX_MODEL_NAME)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None

    @model_validator(mode="after")
    def _check_exactly_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: or else 'messages' must be sent, and not both")
        return self

    @classmethod
    def unread(cls, body: Mapping[str, Any]) -> list[str]:
        """As above, of the messages."""
        return unread_fields(body.get("messages"), kind_of_message, "messages")


class DetokenizeRequest(ApiModel):
    """POST /detokenize."""

    model: Annotated[str, Field(max_length=MAX_MODEL_NAME)] | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]

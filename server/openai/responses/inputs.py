"""The body of POST /v1/responses.

Chat's sampling fields beyond OpenAI's (``top_k``, ``seed``, ``stop``, ...) have the same effect
here and are forwarded. A chat field that has another name here is refused with that name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, model_validator

from server.errors import bad_field, shorten
from server.openai.api_model import MAX_MODEL_NAME, ApiModel
from server.openai.deadline import MAX_DEADLINE_MS
from server.openai.inputs import Label, ServiceTier, Verbosity
from server.openai.metadata import Metadata
from server.openai.responses.input_items import InputItem, NewItem, read_input
from server.openai.responses.item_fields import kind_of_item
from server.openai.responses.items import InputFile, InputImage, ReasoningItem
from server.openai.responses.tools import CustomTool, Namespace, ResponseTool, ToolSet, read_tools
from server.openai.structured import FORMAT_NAME, StructuredFields
from server.openai.tool_fields import ReasoningEffort
from server.openai.unread_fields import unread_fields
from server.openai.unsupported import ignored_params

_MAX_ID = 256

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
IMAGES = "message.input_image.image_url"  # which are always included
# Valid values of ``include``: those with an effect, and those of tools that are not supported.
_INCLUDES = frozenset({LOGPROBS, ENCRYPTED, IMAGES})
_UNSUPPORTED_INCLUDES = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
# Chat fields that have another name here.
_RENAMED_FIELDS = {
    "messages": "'input'",
    "max_tokens": "'max_output_tokens'",
    "max_completion_tokens": "'max_output_tokens'",
    "response_format": "'text.format'",
    "reasoning_effort": "'reasoning.effort'",
    "verbosity": "'text.verbosity'",
    "functions": "'tools'",
    "function_call": "'tool_choice'",
    "logprobs": "'include' with 'message.output_text.logprobs'",
}
_UNSUPPORTED = {
    "prompt": "is not supported; there are no stored prompts here",
    "context_management": "is not supported; 'truncation' may be 'auto'",
    "moderation": "is not supported; nothing here judges texts",
    "prompt_logprobs": "is not supported here; see /v1/chat/completions",
}
# Chat fields that are forwarded.
FORWARDED = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "frequency_penalty",
        "ignore_eos",
        "include_reasoning",
        "include_stop_str_in_output",
        "logit_bias",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "priority",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
        "top_k",
        "truncate_prompt_tokens",
        "truncation_side",
        *StructuredFields.model_fields,
    }
)
_CALLABLE = ("function", "custom")
_ONE_ANSWER = "must be 1: a response is one answer"
_EMPTY: tuple[Any, ...] = (None, False, [], {})


def _read_tool_choice(value: Any) -> Any:
    if value is None or (isinstance(value, str) and value in ("none", "auto", "required")):
        return value
    if not isinstance(value, dict):
        raise ValueError("must be 'none', 'auto', 'required' or an object")
    kind = value.get("type")
    if kind in _CALLABLE:
        if not isinstance(value.get("name"), str):
            raise ValueError(f"must name a {kind} tool")
        return {"type": kind, "name": value["name"]}
    if kind == "allowed_tools":
        tools, mode = value.get("tools"), value.get("mode")
        if mode not in ("auto", "required"):
            raise ValueError("needs a 'mode', 'auto' or 'required'")
        if not isinstance(tools, list) or not tools or not all(map(_names_tool, tools)):
            raise ValueError("needs 'tools', a list of {'type': 'function', 'name': ...}")
        return {
            "type": "allowed_tools",
            "mode": mode,
            "tools": [{"type": tool["type"], "name": tool["name"]} for tool in tools],
        }
    raise ValueError(
        f"of type {shorten(str(kind), 40)!r} is not supported; tools are functions here"
    )


def _names_tool(tool: Any) -> bool:
    return (
        isinstance(tool, dict)
        and tool.get("type") in _CALLABLE
        and isinstance(tool.get("name"), str)
    )


def _read_conversation(value: Any) -> str | None:
    """Parse a conversation's id, which may be wrapped in an object."""
    found = value.get("id") if isinstance(value, dict) else value
    if value is None or (isinstance(found, str) and 0 < len(found) <= _MAX_ID):
        return found
    raise ValueError("must be a conversation's id, or an object with its 'id'")


class TextFormat(ApiModel):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=FORMAT_NAME)] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_is_named(self) -> Self:
        if self.type == "json_schema":
            if not self.name:
                raise ValueError("name: is required for a json_schema")
            if self.schema_ is None:
                raise ValueError("schema: is required for a json_schema")
        return self


class TextOptions(ApiModel):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ReasoningOptions(ApiModel):
    """How much the model reasons, and how reasoning is returned."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # its older name


class NamedConversation(ApiModel):
    """A conversation, by id."""

    id: Annotated[str, Field(min_length=1, max_length=_MAX_ID)]


class ResponseStreamOptions(ApiModel):
    """Padding against traffic analysis, which this server does not add."""

    include_obfuscation: bool | None = None


Input = Annotated[
    list[NewItem], PlainValidator(read_input, json_schema_input_type=str | list[InputItem])
]
Tools = Annotated[
    ToolSet,
    PlainValidator(
        read_tools, json_schema_input_type=list[ResponseTool | CustomTool | Namespace] | None
    ),
]
ToolChoice = Annotated[
    str | dict[str, Any] | None,
    PlainValidator(
        _read_tool_choice,
        json_schema_input_type=Literal["none", "auto", "required"] | dict[str, Any] | None,
    ),
]
ConversationId = Annotated[
    str | None,
    PlainValidator(_read_conversation, json_schema_input_type=str | NamedConversation | None),
]


class ResponseInput(ApiModel):
    """The fields that determine the prompt; enough to count its tokens."""

    model: Annotated[str, Field(max_length=MAX_MODEL_NAME)]
    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: ConversationId = None
    tools: Tools = Field(default_factory=ToolSet)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        if isinstance(body, dict):
            _refuse(body)
        return body

    @model_validator(mode="after")
    def _has_input(self) -> Self:
        if self.conversation is not None and self.previous_response_id is not None:
            raise ValueError("conversation: excludes 'previous_response_id'")
        if not self.input and self.previous_response_id is None and self.conversation is None:
            raise ValueError("input: must not be empty")
        return self

    @property
    def forwarded(self) -> dict[str, Any]:
        """Chat fields with the same effect here; chat's own shape validates them."""
        extra = self.model_extra or {}
        return {k: v for k, v in extra.items() if k in FORWARDED and v is not None}

    def ignored(self) -> list[str]:
        """Names of fields that request something but have no effect."""
        extra = self.model_extra or {}
        known = {*self.forwarded, "n"}  # which is 1, or refused
        names = ignored_params({k: v for k, v in extra.items() if k not in known})
        if self.text is not None:
            names += ignored_params(self.text.model_extra, "text.")
            if self.text.format is not None:
                names += ignored_params(self.text.format.model_extra, "text.format.")
            if self.text.verbosity in ("low", "high"):
                names.append("text.verbosity")
        if self.reasoning is not None:
            names += ignored_params(self.reasoning.model_extra, "reasoning.")
        names += self.tools.ignored()
        for index, item in enumerate(self.input):
            names += [
                f"input.{index}.{field}.{place}.detail"
                for field in ("content", "output")
                for place, part in enumerate(getattr(item, field, None) or ())
                if isinstance(part, InputImage | InputFile) and part.detail != "auto"
            ]
            if isinstance(item, ReasoningItem) and item.encrypted_content is not None:
                names.append(f"input.{index}.encrypted_content")
        return names

    @classmethod
    def unread(cls, body: Mapping[str, Any]) -> list[str]:
        """As above, of the items."""
        return unread_fields(body["input"], kind_of_item, "input")


def include_problem(names: Sequence[str]) -> str | None:
    """The problem with the values of ``include``, to follow the field's name; None if none."""
    unknown = set(names) - _INCLUDES - _UNSUPPORTED_INCLUDES
    return f"cannot hold {shorten(min(unknown), 80)!r}" if unknown else None


class ResponsesRequest(ResponseInput):
    """POST /v1/responses."""

    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None  # of tools that run on the server
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    service_tier: ServiceTier | None = None

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: is only allowed when 'stream' is true")
        if self.background and self.store is False:
            raise ValueError("background: needs 'store', as the answer is fetched later")
        if problem := include_problem(self.include or ()):
            raise ValueError(f"include: {problem}")
        return self

    @property
    def should_store(self) -> bool:
        """Whether the response is stored; true by default."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        """Whether logprobs are returned."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def summary(self) -> str | None:
        """The requested kind of summary."""
        if self.reasoning is None:
            return None
        return self.reasoning.summary or self.reasoning.generate_summary

    def ignored(self) -> list[str]:
        """As above, including those of the whole request."""
        names = super().ignored()
        if self.stream_options is not None:
            names += ignored_params(self.stream_options.model_extra, "stream_options.")
            if self.stream_options.include_obfuscation:
                names.append("stream_options.include_obfuscation")
        if self.service_tier not in (None, "auto", "default"):
            names.append("service_tier")
        if _UNSUPPORTED_INCLUDES & set(self.include or ()):
            names.append("include")
        return names


class InputTokensRequest(ResponseInput):
    """POST /v1/responses/input_tokens."""


def _refuse(body: Mapping[str, Any]) -> None:
    for field, problem in _UNSUPPORTED.items():
        if body.get(field) not in _EMPTY:
            raise bad_field(field, problem)
    for field, name in _RENAMED_FIELDS.items():
        if body.get(field) not in _EMPTY:
            raise bad_field(field, f"is not a field of this endpoint; send {name}")
    if body.get("n") not in (None, 1):
        raise bad_field("n", _ONE_ANSWER)

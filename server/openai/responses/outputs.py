"""The shapes of responses: a response, its list of input items, token counts, and a deletion."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from server.openai import outputs
from server.openai.responses.items import Item

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
FINAL_STATUSES: frozenset[ResponseStatus] = frozenset(
    {"completed", "incomplete", "failed", "cancelled"}
)


class ResponseError(Struct):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(Struct):
    """Why a response ended early: its own limit or the context's."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(Struct):
    """Part of ``usage``."""

    cached_tokens: int
    cache_write_tokens: int = 0  # some providers bill it; not counted here


class OutputTokensDetails(Struct):
    """Part of ``usage``."""

    reasoning_tokens: int


class ResponseUsage(Struct):
    """Tokens read and generated."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: outputs.Usage) -> ResponseUsage:
        """The same numbers under this API's names."""
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(
                usage.completion_tokens_details.reasoning_tokens
            ),
            total_tokens=usage.total_tokens,
        )


class ReasoningConfig(Struct):
    """The request's reasoning options."""

    effort: str | None = None
    summary: str | None = None


class FunctionTool(Struct, tag_field="type", tag="function"):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] | None
    strict: bool
    description: str | None = None


class CustomTool(Struct, tag_field="type", tag="custom"):
    """A tool that the model may call with a text."""

    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class NamespaceTool(Struct, tag_field="type", tag="namespace"):
    """A group of tools."""

    name: str
    description: str
    tools: list[FunctionTool | CustomTool]


class ConversationReference(Struct):
    """The conversation that a response belongs to."""

    id: str


class Response(Struct, kw_only=True):
    """A response: the request's settings and the output so far."""

    id: str
    object: Literal["response"] = "response"
    created_at: int  # Unix time, s
    status: ResponseStatus
    background: bool
    completed_at: int | None = None
    conversation: ConversationReference | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[Item] = field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningConfig
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[FunctionTool | CustomTool | NamespaceTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]

    @property
    def ended(self) -> bool:
        """Whether its state is final."""
        return self.status in FINAL_STATUSES


class ItemList(Struct, kw_only=True):
    """A page of items: a response's input, or a conversation's."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Struct, kw_only=True):
    """The response of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseDeleted(Struct, kw_only=True):
    """The response to a deletion."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True

"""The bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from server.anthropic.content import (
    Block,
    RedactedThinkingBlock,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    kind_of_message,
    kind_of_system,
    read_content,
    read_text,
)
from server.errors import shorten
from server.openai.api_model import MAX_MODEL_NAME, ApiModel
from server.openai.deadline import MAX_DEADLINE_MS
from server.openai.functions import FUNCTION_NAME
from server.openai.unread_fields import unread_fields
from server.openai.unsupported import ignored_params, ignored_tool_params

_MAX_STOPS = 64
_MAX_STOP_CHARS = 4096
_MIN_THINKING_TOKENS = 1024

_BLOCK = {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]}
_BLOCKS: dict[str, tuple[type[Block], ...]] = {
    "user": (*get_args(ResultBlock), ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}
_IGNORED = ("metadata", "service_tier", "cache_control", "inference_geo")  # accepted without effect

Content = Annotated[list[Block], PlainValidator(read_content), WithJsonSchema(_CONTENT)]
SystemText = Annotated[str, PlainValidator(read_text), WithJsonSchema(_CONTENT)]
StopSequence = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)]


def _refuse_mcp_servers(value: Any) -> None:
    if value not in (None, []):
        raise ValueError("is not supported: this server calls no other; define 'tools' instead")


NoMcpServers = Annotated[
    None, PlainValidator(_refuse_mcp_servers), WithJsonSchema({"enum": [None, []], "default": None})
]


class InputMessage(ApiModel):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        if not self.content and self.role != "assistant":
            raise ValueError("content: must be a string or a list of blocks, at least one")
        for block in self.content:
            if not isinstance(block, _BLOCKS[self.role]):
                kind = type(block).__struct_config__.tag
                raise ValueError(f"content: a message of the {self.role} cannot hold {kind!r}")
        return self


class ToolDefinition(ApiModel):
    """A tool that the model may call, and the client runs."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_server_tools(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in (None, "custom"):
            problem = f"{shorten(str(kind), 40)!r} is not supported"
            raise ValueError(f"type: {problem}; define what the client runs by an input_schema")
        return value


class ToolChoice(ApiModel):
    """Whether tools must or may be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _has_name(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise ValueError("name: is required with the type 'tool'")
        if self.type != "tool" and self.name is not None:
            raise ValueError("name: comes with the type 'tool', and with no other")
        return self


class ThinkingConfig(ApiModel):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=_MIN_THINKING_TOKENS)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(ApiModel):
    """The constraint on the answer's text."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(ApiModel):
    """The effort and the format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class TokenCountRequest(ApiModel):
    """POST /v1/messages/count_tokens: a conversation, as for /v1/messages."""

    model: Annotated[str, Field(max_length=MAX_MODEL_NAME)]
    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    system: SystemText | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format
    mcp_servers: NoMcpServers = None

    @model_validator(mode="after")
    def _check_turns(self) -> Self:
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool"):
            names = [tool.name for tool in self.tools or ()]
            if not names:
                raise ValueError("tool_choice: needs 'tools' to choose from")
            if choice.name is not None and choice.name not in names:
                raise ValueError("tool_choice: names a tool that is not in 'tools'")
        if self.output_format is not None and self.format != self.output_format:
            raise ValueError("output_format: asks for another form than 'output_config.format'")
        last = self.messages[-1]
        if any(isinstance(block, ToolUseBlock) for block in last.content):
            raise ValueError("messages: must not end with a call that has no result")
        return self

    @property
    def format(self) -> OutputFormat | None:
        """The constraint on the answer's text, under either name."""
        newer = self.output_config and self.output_config.format
        return newer or self.output_format

    def ignored(self) -> list[str]:
        """Names of fields that request something but have no effect."""
        extra = self.model_extra or {}
        names = ignored_params({name: extra[name] for name in extra if name not in _IGNORED})
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            names.append("thinking.budget_tokens")
        for field in ("thinking", "output_config", "output_format", "tool_choice"):
            part = getattr(self, field)
            names += ignored_params(part and part.model_extra, f"{field}.")
        for index, tool in enumerate(self.tools or ()):
            names += ignored_tool_params(tool.model_extra, f"tools.{index}.")
        return names

    @classmethod
    def unread(cls, body: Mapping[str, Any]) -> list[str]:
        """As above, of the system text and the messages."""
        return unread_fields(body.get("system"), kind_of_system, "system") + unread_fields(
            body["messages"], kind_of_message, "messages"
        )


class MessagesRequest(TokenCountRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: Annotated[list[StopSequence], Field(max_length=_MAX_STOPS)] | None = None
    stream: bool | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None

"""The shapes of responses and of stream events. Keys are those of Anthropic's API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessageText(Struct, tag="text", kw_only=True):
    """A block of text."""

    text: str = ""
    citations: None = None


class MessageThinking(Struct, tag="thinking", kw_only=True):
    """A block of thinking; on a stream, its signature comes last."""

    thinking: str = ""
    signature: str = ""


class MessageToolUse(Struct, tag="tool_use", kw_only=True):
    """A tool call."""

    id: str
    name: str
    input: Any = msgspec.field(default_factory=dict)


MessageBlock = MessageText | MessageThinking | MessageToolUse


class MessageTokensDetails(Struct):
    """Part of ``usage``."""

    thinking_tokens: int


class MessageUsage(Struct, kw_only=True):
    """Tokens read and generated. Cached tokens are not included in ``input_tokens``."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageTokensDetails


class MessageAnswer(Struct, kw_only=True):
    """The response of /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[MessageBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Struct):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int


class MessageDelta(Struct, omit_defaults=True, kw_only=True):
    """An addition to a block, whose kind ``type`` names, or the end of the answer."""

    type: (
        Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | UnsetType
    ) = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType | None = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessagesErrorDetail(Struct):
    """The kind and the message of an error."""

    type: str
    message: str


class MessageEvent(Struct, kw_only=True):
    """An event of a stream; ``type`` determines which other fields are present."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]
    index: int | UnsetType = UNSET
    message: MessageAnswer | UnsetType = UNSET
    content_block: MessageBlock | UnsetType = UNSET
    delta: MessageDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    error: MessagesErrorDetail | UnsetType = UNSET


class MessagesError(Struct, kw_only=True):
    """The body of an error."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str


_encode = msgspec.json.Encoder().encode


def to_sse(event: MessageEvent) -> bytes:
    """``event`` as one server-sent event with its name."""
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), _encode(event))


def to_rfc3339(unix_s: int) -> str:
    """A time as this API writes it."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")

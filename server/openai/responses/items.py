"""What a conversation is made of here: items, as they are answered, stored and listed.

An item that came in and one that was generated have the same form, so that the output of one
response is the input of the next. ``type`` is the tag of each struct.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from server.openai.outputs import TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Role = Literal["user", "assistant", "system", "developer"]


class InputText(Struct, tag_field="type", tag="input_text"):
    """Text that was sent."""

    text: str


class InputImage(Struct, tag_field="type", tag="input_image"):
    """An image that was sent."""

    image_url: str  # data:image/...;base64,...; empty until the file has been read
    detail: str = "auto"
    file_id: str | None = None  # of the file that it was


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Text that was generated."""

    text: str
    annotations: list[Any] = []  # made by tools that are not here
    logprobs: list[TokenLogprob] = []  # empty unless they were asked for


class Refusal(Struct, tag_field="type", tag="refusal"):
    """A refusal that was sent as part of the history."""

    refusal: str


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    """What the model thought, where a summary of it was asked for."""

    text: str


Content = InputText | InputImage | OutputText | Refusal


class MessageItem(Struct, tag_field="type", tag="message", kw_only=True):
    """A message, of the user's side or the model's."""

    id: str
    role: Role
    status: ItemStatus
    content: list[Content]

    def text(self) -> str:
        """Its whole text. Parts that were sent are lines of their own, as in chat."""
        texts = [_text(part) for part in self.content if not isinstance(part, InputImage)]
        return ("" if self.role == "assistant" else "\n").join(texts)

    def for_chat(self) -> str | list[dict[str, Any]]:
        """Its content as chats have it: text, or parts where there are images."""
        return _for_chat(self.content) or self.text()


class CallItem(Struct, tag_field="type", tag="function_call", kw_only=True):
    """A call of a function by the model."""

    id: str
    call_id: str
    name: str
    arguments: str  # JSON
    status: ItemStatus


class CallOutputItem(Struct, tag_field="type", tag="function_call_output", kw_only=True):
    """What a call gave."""

    id: str
    call_id: str
    output: str | list[InputText | InputImage]
    status: ItemStatus

    def for_chat(self) -> str | list[dict[str, Any]]:
        """What it gave as chats have it: text, or parts where there are images."""
        if isinstance(self.output, str):
            return self.output
        texts = [part.text for part in self.output if isinstance(part, InputText)]
        return _for_chat(self.output) or "\n".join(texts)


class ReasoningItem(Struct, tag_field="type", tag="reasoning", kw_only=True):
    """What the model thought before it answered."""

    id: str
    summary: list[SummaryText]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None  # the same text, for clients that keep nothing else
    status: ItemStatus = "completed"

    def text(self) -> str:
        """Its whole text."""
        return "".join(part.text for part in self.content or self.summary)


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem

_decode_item = msgspec.json.Decoder(Item).decode


def read_item(data: bytes) -> Item:
    """An item as ``to_json`` wrote it."""
    return _decode_item(data)


def _for_chat(parts: Sequence[Content]) -> list[dict[str, Any]]:
    """The parts as chats have them; none where all of them are text."""
    if not any(isinstance(part, InputImage) for part in parts):
        return []
    return [
        {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
        if isinstance(part, InputImage)
        else {"type": "text", "text": _text(part)}
        for part in parts
    ]


def _text(part: InputText | OutputText | Refusal) -> str:
    return part.refusal if isinstance(part, Refusal) else part.text

"""The items of a conversation, as returned, stored and listed.

Received and generated items have the same form, so that the output of one response can be the input
of the next. ``type`` is the tag of each struct.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from server.openai.outputs import TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Role = Literal["user", "assistant", "system", "developer"]


class InputText(Struct, tag_field="type", tag="input_text"):
    """Text from a request."""

    text: str


class InputImage(Struct, tag_field="type", tag="input_image"):
    """An image from a request."""

    image_url: str  # data:image/...;base64,...; empty until the file is read
    detail: str = "auto"
    file_id: str | None = None  # the uploaded file, if it was one


class AudioFile(Struct):
    """A file in base64."""

    data: str
    format: str


class InputAudio(Struct, tag_field="type", tag="input_audio"):
    """Audio from a request."""

    input_audio: AudioFile


class InputFile(Struct, tag_field="type", tag="input_file"):
    """A text file from a request."""

    file_data: str  # in base64, perhaps as a data: URL; empty until the file is read
    filename: str | None = None
    file_id: str | None = None  # the uploaded file, if it was one
    detail: str = "auto"


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Generated text."""

    text: str
    annotations: list[Any] = []  # only made by tools that are not supported here
    logprobs: list[TokenLogprob] = []  # empty unless requested


class Refusal(Struct, tag_field="type", tag="refusal"):
    """A refusal in the history."""

    refusal: str


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """The model's reasoning."""

    text: str


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    """The model's reasoning, if a summary was requested."""

    text: str


Content = InputText | InputImage | InputAudio | InputFile | OutputText | Refusal
_OTHERS = (InputImage, InputAudio, InputFile)  # than text


class MessageItem(Struct, tag_field="type", tag="message", kw_only=True):
    """A user, system or assistant message."""

    id: str
    role: Role
    status: ItemStatus
    content: list[Content]

    def text(self) -> str:
        """The whole text. Received parts are joined by newlines, as in chat."""
        texts = [_text(part) for part in self.content if not isinstance(part, _OTHERS)]
        return ("" if self.role == "assistant" else "\n").join(texts)

    def for_chat(self) -> str | list[dict[str, Any]]:
        """The content in chat's form: text, or parts if there is anything else."""
        return _for_chat(self.content) or self.text()


class CallItem(Struct, tag_field="type", tag="function_call", kw_only=True):
    """A function call by the model."""

    id: str
    call_id: str
    name: str
    arguments: str  # JSON
    status: ItemStatus
    namespace: str | UnsetType = UNSET  # of the function, if it has one


class CustomCallItem(Struct, tag_field="type", tag="custom_tool_call", kw_only=True):
    """A call of a custom tool by the model."""

    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


class CallOutputItem(Struct, tag_field="type", tag="function_call_output", kw_only=True):
    """The output of a call."""

    id: str
    call_id: str
    output: str | list[InputText | InputImage | InputFile]
    status: ItemStatus

    def for_chat(self) -> str | list[dict[str, Any]]:
        """The output in chat's form: text, or parts if there is anything else."""
        if isinstance(self.output, str):
            return self.output
        texts = [part.text for part in self.output if isinstance(part, InputText)]
        return _for_chat(self.output) or "\n".join(texts)


class CustomCallOutputItem(CallOutputItem, tag="custom_tool_call_output", kw_only=True):
    """The output of a call of a custom tool."""


class ReasoningItem(Struct, tag_field="type", tag="reasoning", kw_only=True):
    """The model's reasoning before its answer."""

    id: str
    summary: list[SummaryText]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None  # the same text, for clients that store it themselves
    status: ItemStatus = "completed"

    def text(self) -> str:
        """The whole text."""
        return "".join(part.text for part in self.content or self.summary)


Item = (
    MessageItem | CallItem | CallOutputItem | CustomCallItem | CustomCallOutputItem | ReasoningItem
)

_decode_item = msgspec.json.Decoder(Item).decode


def read_item(data: bytes) -> Item:
    """Decode an item encoded by ``to_json``."""
    return _decode_item(data)


def _for_chat(parts: Sequence[Content]) -> list[dict[str, Any]]:
    """The parts in chat's form; empty if all of them are text."""
    if not any(isinstance(part, _OTHERS) for part in parts):
        return []
    return [_part_for_chat(part) for part in parts]


def _part_for_chat(part: Content) -> dict[str, Any]:
    if isinstance(part, InputImage):
        return {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
    if isinstance(part, InputAudio):
        return {"type": "input_audio", "input_audio": msgspec.structs.asdict(part.input_audio)}
    if isinstance(part, InputFile):
        return {"type": "file", "file": {"filename": part.filename, "file_data": part.file_data}}
    return {"type": "text", "text": _text(part)}


def _text(part: InputText | OutputText | Refusal) -> str:
    return part.refusal if isinstance(part, Refusal) else part.text

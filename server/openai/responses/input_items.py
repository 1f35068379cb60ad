"""The items of ``input``, as sent by clients and as stored.

Clients send messages in an easy form (a role and a string) or in full, calls and their outputs,
reasoning from earlier responses, and references to stored items. Each kind is validated by its own
shape and becomes an :class:`Item`; a reference is resolved later, from the store.
"""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import UNSET
from pydantic import Field

from server.errors import bad_field, shorten
from server.openai.api_model import ApiModel
from server.openai.content import check_image_url, read_audio
from server.openai.documents import read_file
from server.openai.responses.items import (
    AudioFile,
    CallItem,
    CallOutputItem,
    Content,
    CustomCallItem,
    CustomCallOutputItem,
    InputAudio,
    InputFile,
    InputImage,
    InputText,
    Item,
    ItemStatus,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Refusal,
    SummaryText,
)

_MAX_ITEMS = 10_000
_MAX_ID = 256
_ENCODED_PREFIX = "quire1."  # prefix of the strings made by ``encode_reasoning``
_TEXTS = ("input_text", "output_text", "text")

ItemId = Annotated[str, Field(min_length=1, max_length=_MAX_ID)]
CallName = Annotated[str, Field(min_length=1, max_length=_MAX_ID)]


class Reference(NamedTuple):
    """A reference to an item of a stored response, by id."""

    id: str


NewItem = Item | Reference


class TextPart(ApiModel):
    """A piece of text in a message or a call's output."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class ImagePart(ApiModel):
    """An image in a user message or a call's output."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: ItemId | None = None  # instead of a URL; stored items have both, and the URL counts
    detail: Literal["auto", "low", "high", "original"] | None = None


class AudioPart(ApiModel):
    """Audio in a user message."""

    type: Literal["input_audio"]
    input_audio: dict[str, Any]  # checked as in chat


class FilePart(ApiModel):
    """A text file in a user message or a call's output."""

    type: Literal["input_file"]
    file_data: str | None = None  # checked as in chat
    file_id: ItemId | None = None
    filename: str | None = None
    detail: Literal["auto", "low", "high"] | None = None  # of pages, which texts do not have


class RefusalPart(ApiModel):
    """A refusal in an assistant message."""

    type: Literal["refusal"]
    refusal: str


class NewMessage(ApiModel):
    """A message: a role and its text, or parts of it."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextPart | ImagePart | AudioPart | FilePart | RefusalPart]
    id: ItemId | None = None
    status: ItemStatus | None = None


class NewCall(ApiModel):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: ItemId
    name: CallName
    arguments: str
    namespace: CallName | None = None
    id: ItemId | None = None
    status: ItemStatus | None = None


class NewCustomCall(ApiModel):
    """A call of a custom tool that the model made."""

    type: Literal["custom_tool_call"]
    call_id: ItemId
    name: CallName
    input: str
    namespace: CallName | None = None
    id: ItemId | None = None
    status: ItemStatus | None = None


class NewCallOutput(ApiModel):
    """The output of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: ItemId
    output: str | list[TextPart | ImagePart | FilePart]
    id: ItemId | None = None
    status: ItemStatus | None = None


class ReasoningPart(ApiModel):
    """A piece of reasoning, or of a summary of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class NewReasoning(ApiModel):
    """Reasoning of an earlier response, passed back to the model."""

    type: Literal["reasoning"]
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None
    encrypted_content: str | None = None
    id: ItemId | None = None
    status: ItemStatus | None = None


class NewReference(ApiModel):
    """A reference to an item of a stored response."""

    type: Literal["item_reference"] | None = None
    id: ItemId


InputItem = NewMessage | NewCall | NewCustomCall | NewCallOutput | NewReasoning | NewReference


def read_input(value: Any) -> list[NewItem]:
    """Parse a request's input; a string is one user message.

    Raises ApiError (400) that names the invalid item, ValueError if there are none.
    """
    if isinstance(value, str):
        return [_message(NewMessage(role="user", content=value), "input")]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    if len(value) > _MAX_ITEMS:
        raise ValueError(f"holds {len(value)} items; at most {_MAX_ITEMS} are taken")
    return read_items(value, "input")


def read_items(value: list[Any], field: str) -> list[NewItem]:
    """Parse the items of a field. Raises ApiError (400) that names the invalid one."""
    return [_read_item(item, f"{field}.{index}") for index, item in enumerate(value)]


def new_item_id(prefix: str) -> str:
    """A new id: ``msg_``, ``fc_``, ``fco_`` or ``rs_``."""
    return f"{prefix}_{uuid.uuid4().hex}"


def encode_reasoning(text: str) -> str:
    """Encode reasoning as an opaque string, for clients that do not use stored responses.

    It contains the plain text: the same reasoning is shown to the client anyway.
    """
    return _ENCODED_PREFIX + base64.urlsafe_b64encode(text.encode("utf-8", "surrogatepass")).decode(
        "ascii"
    )


def decode_reasoning(sealed: str) -> str | None:
    """Decode what ``encode_reasoning`` made; None for a string that only its own maker can read.

    Raises ValueError if it is one of ours, and damaged.
    """
    body = sealed.removeprefix(_ENCODED_PREFIX)
    if body == sealed:
        return None
    try:
        return base64.b64decode(body, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, UnicodeError):
        raise ValueError("was made by a server like this one, and is damaged") from None


def _read_item(item: Any, where: str) -> NewItem:
    if not isinstance(item, dict):
        raise bad_field(where, "must be an object")
    at = where + "."
    match item.get("type"):
        case "message" | None if "role" in item:
            _check_parts(item.get("content"), at + "content")
            return _message(NewMessage.read({**item, "type": "message"}, at), where)
        case "function_call":
            return _call(NewCall.read(item, at))
        case "custom_tool_call":
            return _custom_call(NewCustomCall.read(item, at))
        case "function_call_output" | "custom_tool_call_output":
            _check_parts(item.get("output"), at + "output")
            return _output(NewCallOutput.read(item, at))
        case "reasoning":
            return _reasoning(NewReasoning.read(item, at), at)
        case "item_reference" | None if "id" in item:
            return Reference(NewReference.read(item, at).id)
        case "message":
            raise bad_field(at + "role", "is required")
        case "item_reference":
            raise bad_field(at + "id", "is required")
        case None:
            raise bad_field(at + "role", "or a 'type' is required")
        case kind:
            raise bad_field(at + "type", f"{shorten(str(kind), 40)!r} is not supported")


def _check_parts(parts: Any, where: str) -> None:
    """Report an unsupported part by its type, before the shape calls it malformed."""
    if not isinstance(parts, list):
        if not isinstance(parts, str):
            raise bad_field(where, "must be a string or a list of parts")
        return
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "input_image":
            _check_image(part, where, index)
        elif kind in ("input_audio", "input_file"):
            try:
                read_audio(part) if kind == "input_audio" else read_file(part)
            except ValueError as problem:
                raise bad_field(where, f"part {index}: {problem}") from None
        elif kind not in _TEXTS and kind != "refusal":
            shown = shorten(str(kind), 40)
            problem = f"has a part {index} of type {shown!r}; send text, images, audio or files"
            raise bad_field(where, problem)


def _check_image(part: Mapping[str, Any], where: str, index: int) -> None:
    url = part.get("image_url")
    if url is None and part.get("file_id") is not None:
        return
    try:
        check_image_url(url)
    except ValueError as problem:
        raise bad_field(where, f"part {index}: its 'image_url' {problem}") from None


def _message(item: NewMessage, where: str) -> MessageItem:
    is_answer = item.role == "assistant"
    text_part = OutputText if is_answer else InputText
    content: list[Content] = []
    for part in [item.content] if isinstance(item.content, str) else item.content:
        if isinstance(part, RefusalPart):
            if not is_answer:
                raise bad_field(f"{where}.content", "may hold a refusal of the assistant's alone")
            content.append(Refusal(part.refusal))
        elif isinstance(part, ImagePart):
            if item.role != "user":
                raise bad_field(f"{where}.content", "may hold images of the user's alone")
            content.append(_image(part))
        elif isinstance(part, FilePart):
            if item.role != "user":
                raise bad_field(f"{where}.content", "may hold files of the user's alone")
            content.append(_file(part))
        elif isinstance(part, AudioPart):
            if item.role != "user":
                raise bad_field(f"{where}.content", "may hold audio of the user's alone")
            audio = part.input_audio
            content.append(InputAudio(AudioFile(audio["data"], audio["format"])))
        else:
            content.append(text_part(part if isinstance(part, str) else part.text))
    return MessageItem(
        id=item.id or new_item_id("msg"),
        role=item.role,
        status=item.status or "completed",
        content=content,
    )


def _image(part: ImagePart) -> InputImage:
    return InputImage(part.image_url or "", part.detail or "auto", part.file_id)


def _file(part: FilePart) -> InputFile:
    return InputFile(part.file_data or "", part.filename, part.file_id, part.detail or "auto")


def _call(item: NewCall) -> CallItem:
    return CallItem(
        id=item.id or new_item_id("fc"),
        call_id=item.call_id,
        name=item.name,
        arguments=item.arguments,
        status=item.status or "completed",
        namespace=item.namespace or UNSET,
    )


def _custom_call(item: NewCustomCall) -> CustomCallItem:
    return CustomCallItem(
        id=item.id or new_item_id("ctc"),
        call_id=item.call_id,
        name=item.name,
        input=item.input,
        status=item.status or "completed",
        namespace=item.namespace or UNSET,
    )


def _output(item: NewCallOutput) -> CallOutputItem:
    output = item.output
    kind = CallOutputItem if item.type == "function_call_output" else CustomCallOutputItem
    return kind(
        id=item.id or new_item_id("fco"),
        call_id=item.call_id,
        output=output if isinstance(output, str) else [_output_part(part) for part in output],
        status=item.status or "completed",
    )


def _output_part(part: TextPart | ImagePart | FilePart) -> InputText | InputImage | InputFile:
    if isinstance(part, TextPart):
        return InputText(part.text)
    return _image(part) if isinstance(part, ImagePart) else _file(part)


def _reasoning(item: NewReasoning, at: str) -> ReasoningItem:
    content = None if item.content is None else [ReasoningText(part.text) for part in item.content]
    unread: str | None = None
    if not content and item.encrypted_content:
        try:
            text = decode_reasoning(item.encrypted_content)
        except ValueError as error:
            raise bad_field(at + "encrypted_content", str(error)) from None
        if text is None:
            unread = item.encrypted_content
        else:
            content = [ReasoningText(text)]
    return ReasoningItem(
        id=item.id or new_item_id("rs"),
        summary=[SummaryText(part.text) for part in item.summary or ()],
        content=content,
        encrypted_content=unread,
        status=item.status or "completed",
    )

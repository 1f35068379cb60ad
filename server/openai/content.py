"""The content of a message: text, or a list of parts that may include images.

Images are accepted only as ``data:`` URLs: the server fetches nothing for a client. Their bytes are
decoded once the model is known (``chat_prompt.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Struct
from pydantic import PlainValidator, WithJsonSchema

from engine.images.base64 import is_data_url
from server.errors import shorten
from server.openai.unread_fields import always, by_type, read_fields_of

_TEXT_PARTS = ("text", "input_text", "refusal")
_IMAGE_PARTS = ("image_url", "input_image")
_DETAILS = ("auto", "low", "high", "original")

_TEXT = read_fields_of(("type", "text"))
_IMAGE = read_fields_of(
    ("type", "image_url", "detail"), image_url=always(read_fields_of(("url", "detail")))
)
kind_of_part = by_type(
    {
        "text": _TEXT,
        "input_text": _TEXT,
        "refusal": read_fields_of(("type", "refusal")),
        "image_url": _IMAGE,
        "input_image": _IMAGE,
    }
)


class ImagePart(Struct, frozen=True):
    """An image in a message."""

    url: str  # data:image/...;base64,...
    detail: str | None = None  # a hint of the resolution, which the models here do not use

    @property
    def data(self) -> str:
        """The image file in base64."""
        return self.url.partition(",")[2]


Parts = Sequence[str | ImagePart]


def read_content(value: Any) -> str | Parts | None:
    """A message's content: its text parts joined by newlines, or all parts if any is an image.

    Raises ValueError that names the invalid part.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of parts, at least one")
    parts = [_read_part(part, index) for index, part in enumerate(value)]
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def text_of(content: str | Parts | None) -> str | None:
    """The text of a content, its parts joined by newlines."""
    if content is None or isinstance(content, str):
        return content
    return "\n".join(part for part in content if isinstance(part, str))


def for_template(content: str | Parts | None) -> str | list[dict[str, str]] | None:
    """The content as chat templates expect it, in which an image is only a placeholder."""
    if content is None or isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in content
    ]


def to_chat_parts(content: Parts) -> list[dict[str, Any]]:
    """The parts in the shape in which chat clients send them."""
    converted: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            converted.append({"type": "text", "text": part})
        else:
            image = {"url": part.url, "detail": part.detail or "auto"}
            converted.append({"type": "image_url", "image_url": image})
    return converted


def check_image_url(url: Any) -> str:
    """The URL, if it embeds an image. Raises ValueError whose text follows a field's name."""
    if not isinstance(url, str) or not is_data_url(url):
        raise ValueError(
            "must begin with data:image/...;base64, and hold the image itself; nothing is fetched"
        )
    return url


def _read_part(part: Any, index: int) -> str | ImagePart:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _IMAGE_PARTS:
        return _read_image(part, index)
    if kind is None:
        raise ValueError(f"part {index}: must be an object with a 'type'")
    if kind not in _TEXT_PARTS:
        shown = shorten(str(kind), 40)
        raise ValueError(f"parts of type {shown!r} are not supported; send text or images")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise ValueError("a text part must hold a string")
    return text


def _read_image(part: Mapping[str, Any], index: int) -> ImagePart:
    """Parse an image as chat sends it (an object with a URL), or as Responses does (the URL)."""
    image = part.get("image_url")
    detail = part.get("detail")
    if isinstance(image, dict):
        image, detail = image.get("url"), image.get("detail", detail)
    if detail is not None and detail not in _DETAILS:
        raise ValueError(f"part {index}: its detail must be one of {', '.join(_DETAILS)}")
    try:
        return ImagePart(check_image_url(image), detail)
    except ValueError as problem:
        raise ValueError(f"part {index}: its URL {problem}") from None


_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "object"}},
        {"type": "null"},
    ]
}

Content = Annotated[str | Parts | None, PlainValidator(read_content), WithJsonSchema(_SCHEMA)]

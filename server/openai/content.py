"""The content of a message: text, or a list of parts that may include images, videos and audio.

These are accepted only as they are, in base64: the server fetches nothing for a client. Their bytes
are decoded once the model is known (``chat_prompt.py``). Files are texts; one that was uploaded
before is read in ``message_files.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Struct
from pydantic import PlainValidator, WithJsonSchema

from engine.images.base64 import is_audio_url, is_data_url, is_video_url
from server.errors import shorten
from server.openai.documents import FileReference, read_file
from server.openai.unread_fields import always, by_type, read_fields_of

_TEXT_PARTS = ("text", "input_text", "refusal")
_IMAGE_PARTS = ("image_url", "input_image")
_AUDIO_PARTS = ("input_audio", "audio_url")
_FILE_PARTS = ("file", "input_file")
_AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "aiff", "m4a", "mp4", "aac", "webm")
_DETAILS = ("auto", "low", "high", "original")

_FILE_FIELDS = ("filename", "file_data", "file_id")

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
        "input_audio": read_fields_of(
            ("type", "input_audio"), input_audio=always(read_fields_of(("data", "format")))
        ),
        "audio_url": read_fields_of(
            ("type", "audio_url"), audio_url=always(read_fields_of(("url",)))
        ),
        "video_url": read_fields_of(
            ("type", "video_url"), video_url=always(read_fields_of(("url",)))
        ),
        "file": read_fields_of(("type", "file"), file=always(read_fields_of(_FILE_FIELDS))),
        "input_file": read_fields_of(("type", *_FILE_FIELDS)),
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


class AudioPart(Struct, frozen=True):
    """An audio clip in a message."""

    data: str  # the file in base64
    format: str | None = None  # as the client names it; None: it is part of a URL
    url_head: str = ""  # the URL up to the data

    def to_chat(self) -> dict[str, Any]:
        """The part in the shape in which chat clients send it."""
        if self.format is None:
            return {"type": "audio_url", "audio_url": {"url": self.url_head + self.data}}
        return {"type": "input_audio", "input_audio": {"data": self.data, "format": self.format}}


class VideoPart(Struct, frozen=True):
    """A video in a message."""

    url: str  # data:video/...;base64,...

    @property
    def data(self) -> str:
        """The video file in base64."""
        return self.url.partition(",")[2]


MediaPart = ImagePart | VideoPart | AudioPart
Part = str | MediaPart | FileReference
Parts = Sequence[Part]
_KINDS = {ImagePart: "image", VideoPart: "video", AudioPart: "audio"}  # as templates call them
_PLURALS = {ImagePart: "images", VideoPart: "videos", AudioPart: "audio"}


def read_content(value: Any) -> str | Parts | None:
    """A message's content: its text parts joined by newlines, or all parts if not all are text.

    Raises ValueError that names the invalid part.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of parts, at least one")
    return join_texts([_read_part(part, index) for index, part in enumerate(value)])


def join_texts(parts: Parts) -> str | Parts:
    """The parts joined by newlines if all of them are text, or as they are."""
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def text_of(content: str | Parts | None) -> str | None:
    """The text of a content, its parts joined by newlines."""
    if content is None or isinstance(content, str):
        return content
    return "\n".join(part for part in content if isinstance(part, str))


def parts_of(content: str | Parts | None) -> Parts:
    """The parts of a content; none if it is a plain text."""
    return () if content is None or isinstance(content, str) else content


def images_of(content: str | Parts | None) -> dict[int, ImagePart]:
    """The images, by their index among the parts."""
    parts = enumerate(parts_of(content))
    return {index: part for index, part in parts if isinstance(part, ImagePart)}


def audio_of(content: str | Parts | None) -> list[AudioPart]:
    """The audio clips, in order."""
    return [part for part in parts_of(content) if isinstance(part, AudioPart)]


def videos_of(content: str | Parts | None) -> list[VideoPart]:
    """The videos, in order."""
    return [part for part in parts_of(content) if isinstance(part, VideoPart)]


def media_kind(content: str | Parts | None) -> str | None:
    """The plural of what a content holds besides text; None if it is text alone."""
    kinds = (_PLURALS.get(type(part)) for part in parts_of(content))
    return next(filter(None, kinds), None)


def for_template(content: str | Parts | None) -> str | list[dict[str, str]] | None:
    """The content, with its files read, as chat templates expect it: media are placeholders."""
    if content is None or isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": _KINDS[type(part)]}
        for part in content
        if not isinstance(part, FileReference)
    ]


def to_chat_parts(content: Parts) -> list[dict[str, Any]]:
    """The parts, with files read, in the shape in which chat clients send them."""
    converted: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            converted.append({"type": "text", "text": part})
        elif isinstance(part, AudioPart):
            converted.append(part.to_chat())
        elif isinstance(part, VideoPart):
            converted.append({"type": "video_url", "video_url": {"url": part.url}})
        elif isinstance(part, ImagePart):
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


def _read_part(part: Any, index: int) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _IMAGE_PARTS:
        return _read_image(part, index)
    if kind in _AUDIO_PARTS or kind in _FILE_PARTS:
        try:
            return read_audio(part) if kind in _AUDIO_PARTS else _read_file(part)
        except ValueError as problem:
            raise ValueError(f"part {index}: {problem}") from None
    if kind == "video_url":
        return _read_video(part, index)
    if kind is None:
        raise ValueError(f"part {index}: must be an object with a 'type'")
    if kind not in _TEXT_PARTS:
        shown = shorten(str(kind), 40)
        raise ValueError(
            f"holds a part of type {shown!r}, which is not supported; send text, images, videos, "
            "audio or files"
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise ValueError(f"part {index} must hold its text as a string")
    return text


def read_audio(part: Mapping[str, Any]) -> AudioPart:
    """Parse audio as chat sends it, or as vLLM's clients do.

    Raises ValueError whose text begins with the field's name.
    """
    if part["type"] == "audio_url":
        audio = part.get("audio_url")
        url = audio.get("url") if isinstance(audio, dict) else audio
        if not isinstance(url, str) or not is_audio_url(url):
            raise ValueError(
                "its URL must begin with data:audio/...;base64, and hold the audio itself; nothing "
                "is fetched"
            )
        head, comma, data = url.partition(",")
        return AudioPart(data, url_head=head + comma)
    audio = part.get("input_audio")
    if not isinstance(audio, dict) or not isinstance(audio.get("data"), str):
        raise ValueError("its 'input_audio' must be an object with the file's 'data' in base64")
    kind = audio.get("format")
    if kind not in _AUDIO_FORMATS:
        raise ValueError(f"its format must be one of {', '.join(_AUDIO_FORMATS)}")
    return AudioPart(audio["data"], kind)


def _read_file(part: Mapping[str, Any]) -> str | FileReference:
    """Parse a file as chat sends it (in an object of its own), or as Responses does."""
    file = part if part["type"] == "input_file" else part.get("file")
    if not isinstance(file, dict):
        raise ValueError("its 'file' must be an object with 'file_data' or 'file_id'")
    return read_file(file)


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


def _read_video(part: Mapping[str, Any], index: int) -> VideoPart:
    """Parse a video as vLLM's clients send it."""
    video = part.get("video_url")
    url = video.get("url") if isinstance(video, dict) else video
    if not isinstance(url, str) or not is_video_url(url):
        raise ValueError(
            f"part {index}: its URL must begin with data:video/...;base64, and hold the video "
            "itself; nothing is fetched"
        )
    return VideoPart(url)


_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "object"}},
        {"type": "null"},
    ]
}

Content = Annotated[str | Parts | None, PlainValidator(read_content), WithJsonSchema(_SCHEMA)]

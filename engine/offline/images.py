"""Images and audio in conversations of the offline ``LLM``.

Images are files, data: URLs, or Pillow images; audio is files, data: URLs, or samples. For videos
see ``videos.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.audio.read import AudioReader, process_audio
from engine.audio.types import AudioClip, AudioRules, ProcessedAudio
from engine.errors import InvalidParameter
from engine.images.base64 import decode_base64, is_audio_url, is_data_url
from engine.images.read import ProcessedImage, process_image, read_image
from engine.images.types import Image, ImageRules
from engine.offline.videos import VideoSource, is_video, source_of

if TYPE_CHECKING:
    from engine.text.template import Message

_KINDS = ("image", "image_url", "input_image")
_AUDIO_KINDS = ("audio", "audio_url", "input_audio")


class ChatPrompt(NamedTuple):
    """A prompt in which each image, video and clip already has all of its tokens."""

    token_ids: list[int]
    images: tuple[Image, ...] = ()
    audio: tuple[AudioClip, ...] = ()


class GivenMedia(NamedTuple):
    """What the messages of a conversation hold besides text, each kind in order."""

    images: list[Any]
    videos: list[VideoSource]
    sounds: list[Any]


def extract_media(messages: Sequence[Message]) -> tuple[list[Message], GivenMedia]:
    """Split messages into those that the chat template takes, and what they hold besides text."""
    images: list[Any] = []
    videos: list[VideoSource] = []
    sounds: list[Any] = []
    plain: list[Message] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            images += [_source(part) for part in content if _is_image(part)]
            videos += [source_of(part) for part in content if is_video(part)]
            sounds += [_sound(part) for part in content if _is_audio(part)]
            message = {**message, "content": [_placeholder(part) for part in content]}
        plain.append(message)
    return plain, GivenMedia(images, videos, sounds)


def process_images(sources: Sequence[Any], rules: ImageRules | None) -> list[ProcessedImage]:
    """Preprocess images for the model.

    Args:
        sources: paths, file contents, ``data:`` URLs, or Pillow images.
        rules: of the model; None: it does not take images.

    Raises:
        InvalidParameter: an image is unsuitable, or there are too many.
        OSError: a file cannot be read.
    """
    if not sources:
        return []
    if rules is None:
        raise InvalidParameter("this model takes no images here; send text", param="messages")
    if len(sources) > rules.max_images:
        problem = f"{len(sources)} images; at most {rules.max_images} are taken"
        raise InvalidParameter(problem, param="messages")
    rules = rules.among(len(sources))
    return [_process(source, rules) for source in sources]


def process_sounds(
    sources: Sequence[Any], rules: AudioRules | None, reader: AudioReader
) -> list[ProcessedAudio]:
    """Preprocess audio for the model.

    Args:
        sources: paths, file contents, ``data:`` URLs, or pairs of samples and their rate.
        rules: of the model; None: it does not take audio.
        reader: decodes files.

    Raises:
        InvalidParameter: a clip is unsuitable, or there are too many.
        OSError: a file cannot be read.
    """
    if not sources:
        return []
    if rules is None:
        raise InvalidParameter("this model takes no audio here; send text", param="messages")
    if len(sources) > rules.max_clips:
        problem = f"{len(sources)} audio clips; at most {rules.max_clips} are taken"
        raise InvalidParameter(problem, param="messages")
    return [_process_sound(source, rules, reader) for source in sources]


def _placeholder(part: Any) -> Any:
    """What the chat template is given for a part."""
    if _is_image(part):
        return {"type": "image"}
    if is_video(part):
        return {"type": "video"}
    return {"type": "audio"} if _is_audio(part) else part


def _is_audio(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _AUDIO_KINDS


def _sound(part: Mapping[str, Any]) -> Any:
    """The audio of a part in the format of transformers, chat completions or vLLM."""
    names = ("audio", "audio_url", "input_audio", "path", "url")
    found = next((part[name] for name in names if name in part), None)
    if isinstance(found, Mapping) and "data" in found:
        return decode_base64(str(found["data"]), "audio")
    return found.get("url") if isinstance(found, Mapping) else found


def _process_sound(source: Any, rules: AudioRules, reader: AudioReader) -> ProcessedAudio:
    if isinstance(source, str) and is_audio_url(source):
        return reader.read(decode_base64(source.partition(",")[2], "audio"), rules)
    if isinstance(source, str) and source[:5].lower() in ("data:", "http:", "https"):
        problem = "audio is files, or data: URLs in base64; nothing is fetched"
        raise InvalidParameter(problem, param="messages")
    if isinstance(source, (str, Path)):
        return reader.read(Path(source).read_bytes(), rules)
    if isinstance(source, (bytes, bytearray)):
        return reader.read(bytes(source), rules)
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], int):
        return process_audio(np.asarray(source[0]), source[1], rules)
    problem = f"audio cannot be a {type(source).__name__}"
    raise InvalidParameter(problem, param="messages")


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def _source(part: Mapping[str, Any]) -> Any:
    """The image of a part in the format of transformers, chat completions or responses."""
    found = next((part[name] for name in ("image", "image_url") if name in part), None)
    return found.get("url") if isinstance(found, Mapping) else found


def _process(source: Any, rules: ImageRules) -> ProcessedImage:
    if isinstance(source, str) and is_data_url(source):
        return read_image(decode_base64(source.partition(",")[2]), rules)
    if isinstance(source, str) and source[:5].lower() in ("data:", "http:", "https"):
        problem = "images are files, or data: URLs in base64; nothing is fetched"
        raise InvalidParameter(problem, param="messages")
    if isinstance(source, (str, Path)):
        return read_image(Path(source).read_bytes(), rules)
    if isinstance(source, (bytes, bytearray)):
        return read_image(bytes(source), rules)
    if hasattr(source, "getbands"):
        return process_image(source, rules)
    problem = f"an image cannot be a {type(source).__name__}"
    raise InvalidParameter(problem, param="messages")

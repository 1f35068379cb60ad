"""Images in conversations of the offline ``LLM``: files, data: URLs, or Pillow images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import InvalidParameter
from engine.images.base64 import decode_base64, is_data_url
from engine.images.read import ProcessedImage, process_image, read_image
from engine.images.types import Image, ImageRules

if TYPE_CHECKING:
    from engine.text.template import Message

_KINDS = ("image", "image_url", "input_image")


class ChatPrompt(NamedTuple):
    """A prompt in which each image already has all of its tokens."""

    token_ids: list[int]
    images: tuple[Image, ...] = ()


def extract_images(messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """Split messages into those that the chat template takes and their images, in order."""
    taken: list[Any] = []
    plain: list[Message] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)) and any(map(_is_image, content)):
            taken += [_source(part) for part in content if _is_image(part)]
            content = [{"type": "image"} if _is_image(part) else part for part in content]
            message = {**message, "content": content}
        plain.append(message)
    return plain, taken


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
    return [_process(source, rules) for source in sources]


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

"""Which tokens stand for an image, from the files of a model directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from engine.errors import ModelLoadError
from engine.models.config_reader import ConfigReader
from engine.models.json_file import parse_object, read_bytes


class ImageTokens(NamedTuple):
    """See ``ImageRules``."""

    token_id: int
    row_end_id: int | None = None
    end_id: int | None = None


TokenReader = Callable[[ConfigReader, Path], ImageTokens]


def qwen_tokens(default: int) -> TokenReader:
    """Qwen: one for each cell, and none between."""

    def read(config: ConfigReader, directory: Path) -> ImageTokens:
        return ImageTokens(config.whole("image_token_id", default))

    return read


def mistral_tokens(config: ConfigReader, directory: Path) -> ImageTokens:
    """Mistral Small 3.1: one behind each row besides, whose names the tokenizer knows."""
    token_id = config.whole("image_token_index", config.whole("image_token_id", 10))
    path = directory / "processor_config.json"
    names = parse_object(path, read_bytes(path)) if path.is_file() else {}
    ids = _added_tokens(directory / "tokenizer.json")
    if ids is None:  # a tokenizer of another kind, which has them in the places of all of Mistral's
        return ImageTokens(token_id, 12, 13)
    found = []
    for key, usual in (("image_break_token", "[IMG_BREAK]"), ("image_end_token", "[IMG_END]")):
        name = names.get(key, usual)
        if not isinstance(name, str) or name not in ids:
            raise ModelLoadError(f"{directory / 'tokenizer.json'}: has no token {name!r:.80}")
        found.append(ids[name])
    return ImageTokens(token_id, *found)


class _Token(msgspec.Struct):
    id: Annotated[int, msgspec.Meta(ge=0)]
    content: str


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_Token] = []


def _added_tokens(path: Path) -> dict[str, int] | None:
    """The tokens that are no pieces of text, by name; None without the file."""
    if not path.is_file():
        return None
    try:
        read = msgspec.json.decode(read_bytes(path), type=_Tokenizer)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise ModelLoadError(f"{path}: is not a tokenizer") from None
    return {token.content: token.id for token in read.added_tokens}

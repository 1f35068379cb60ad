"""The tokens that represent an image, from the files of a model directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from engine.errors import ModelLoadError
from engine.images.types import PlaceholderRewrite, TileRewrite
from engine.models.config_reader import ConfigReader
from engine.models.json_file import parse_object, read_bytes


class ImageTokenIds(NamedTuple):
    """See ``ImageRules``."""

    token_id: int
    row_end_id: int | None = None
    end_id: int | None = None
    rewriting: PlaceholderRewrite | TileRewrite | None = None


TokenReader = Callable[[ConfigReader, Path], ImageTokenIds]


def qwen_tokens(default: int) -> TokenReader:
    """Qwen: one token per cell, without separators."""

    def read(config: ConfigReader, directory: Path) -> ImageTokenIds:
        token_id = config.non_negative("image_token_id", default)
        return ImageTokenIds(config.non_negative("image_token_index", token_id))

    return read


def mistral_tokens(config: ConfigReader, directory: Path) -> ImageTokenIds:
    """Mistral Small 3.1: one token more after each row; the tokenizer has their ids."""
    token_id = config.non_negative("image_token_index", config.non_negative("image_token_id", 10))
    path = directory / "processor_config.json"
    names = parse_object(path, read_bytes(path)) if path.is_file() else {}
    ids = _added_tokens(directory / "tokenizer.json")
    if ids is None:  # another tokenizer: Mistral's usual ids
        return ImageTokenIds(token_id, 12, 13)
    found = []
    for key, usual in (("image_break_token", "[IMG_BREAK]"), ("image_end_token", "[IMG_END]")):
        name = names.get(key, usual)
        if not isinstance(name, str) or name not in ids:
            raise ModelLoadError(f"{directory / 'tokenizer.json'}: has no token {name!r:.80}")
        found.append(ids[name])
    return ImageTokenIds(token_id, *found)


def gemma3_tokens(config: ConfigReader, directory: Path) -> ImageTokenIds:
    """Gemma 3: templates write the begin-of-image token."""
    token_id = config.non_negative(
        "image_token_index", config.non_negative("image_token_id", 262_144)
    )
    begin = config.non_negative("boi_token_index", config.non_negative("boi_token_id", 255_999))
    end = config.non_negative("eoi_token_index", config.non_negative("eoi_token_id", 256_000))
    names = token_names(directory, (begin, token_id, end))
    if names is None:
        return ImageTokenIds(token_id)
    whole = "".join(names)
    return ImageTokenIds(token_id, rewriting=PlaceholderRewrite(names[0], f"\n\n{whole}\n\n"))


def gemma4_tokens(config: ConfigReader, directory: Path) -> ImageTokenIds:
    """Gemma 4: templates write the image token, which is between two others."""
    token_id = config.non_negative("image_token_id", 258_880)
    begin = config.non_negative("boi_token_id", 255_999)
    end = config.non_negative("eoi_token_id", 258_882)
    names = token_names(directory, (begin, token_id, end))
    if names is None:
        return ImageTokenIds(token_id)
    return ImageTokenIds(token_id, rewriting=PlaceholderRewrite(names[1], "".join(names)))


def idefics3_tokens(config: ConfigReader, directory: Path) -> ImageTokenIds:
    """Idefics3 and SmolVLM: a tile is named by its row and column, and begins with a token of its
    own. The names of tiles are tokens in SmolVLM and plain text in Idefics3."""
    token_id = config.non_negative("image_token_id", 128_257)
    names = token_names(directory, (token_id,))
    if names is None:
        return ImageTokenIds(token_id)
    image, around = names[0], "<fake_token_around_image>"
    require_names(directory, (around,))
    alone = f"{around}<global-img>{image}{around}"
    rewriting = TileRewrite(
        image,
        tile=around + "<row_{row}_col_{column}>" + image,
        row_end="\n",
        whole=f"\n{alone}",
        alone=alone,
    )
    return ImageTokenIds(token_id, rewriting=rewriting)


def internvl_tokens(config: ConfigReader, directory: Path) -> ImageTokenIds:
    """InternVL: all tiles of an image, one after the other, between two tokens."""
    token_id = config.non_negative("image_token_id", 151_667)
    names = token_names(directory, (token_id,))
    if names is None:
        return ImageTokenIds(token_id)
    image, begin, end = names[0], "<img>", "</img>"
    require_names(directory, (begin, end))
    rewriting = TileRewrite(image, tile=image, whole=image, alone=image, begin=begin, end=end)
    return ImageTokenIds(token_id, rewriting=rewriting)


def cohere_tokens(config: ConfigReader, directory: Path) -> ImageTokenIds:
    """Command A Vision: a token ends each tile, and two more surround the image."""
    token_id = config.non_negative("image_token_id", 255_036)
    names = token_names(directory, (token_id,))
    if names is None:
        return ImageTokenIds(token_id)
    begin, end, row_end = "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"
    require_names(directory, (begin, end, row_end))
    image = names[0]
    tile = image + row_end
    rewriting = TileRewrite(image, tile=tile, whole=tile, alone=tile, begin=begin, end=end)
    return ImageTokenIds(token_id, rewriting=rewriting)


def aya_tokens(config: ConfigReader, directory: Path) -> ImageTokenIds:
    """Aya Vision: numbered tiles; templates write a placeholder that is plain text."""
    token_id = config.non_negative(
        "image_token_index", config.non_negative("image_token_id", 255_036)
    )
    names = token_names(directory, (token_id,))
    if names is None:
        return ImageTokenIds(token_id)
    image, begin, end = names[0], "<|START_OF_IMG|>", "<|END_OF_IMG|>"
    require_names(directory, (begin, end))
    whole = f"TILE_GLOBAL{image}"
    rewriting = TileRewrite(
        *("<image>", f"TILE_{{number}}{image}"), whole=whole, alone=whole, begin=begin, end=end
    )
    return ImageTokenIds(token_id, rewriting=rewriting)


def lfm2_tokens(config: ConfigReader, directory: Path) -> ImageTokenIds:
    """LFM2-VL: a token names each tile, and another the whole image behind them."""
    token_id = config.non_negative("image_token_id", 396)
    names = token_names(directory, (token_id,))
    if names is None:
        return ImageTokenIds(token_id)
    image, begin, end, thumbnail = names[0], "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
    require_names(directory, (begin, end, thumbnail, "<|img_row_1_col_1|>"))
    tile = "<|img_row_{row}_col_{column}|>" + image
    rewriting = TileRewrite(
        *(image, tile), whole=thumbnail + image, alone=image, begin=begin, end=end
    )
    return ImageTokenIds(token_id, rewriting=rewriting)


def token_id_of(directory: Path, name: str) -> int:
    """Return the id of an added token. Raises ModelLoadError if there is none."""
    require_names(directory, (name,))
    return (_added_tokens(directory / "tokenizer.json") or {})[name]


def require_names(directory: Path, names: tuple[str, ...]) -> None:
    """Raise ModelLoadError if the tokenizer lacks a token; it would be read as plain text."""
    path = directory / "tokenizer.json"
    added = _added_tokens(path) or {}
    for name in names:
        if name not in added:
            raise ModelLoadError(f"{path}: has no token {name!r:.80}")


def token_names(directory: Path, ids: tuple[int, ...]) -> list[str] | None:
    """Return the spelling of tokens; None if there is no ``tokenizer.json``."""
    path = directory / "tokenizer.json"
    added = _added_tokens(path)
    if added is None:
        return None
    names = {id_: name for name, id_ in added.items()}
    missing = [id_ for id_ in ids if id_ not in names]
    if missing:
        raise ModelLoadError(f"{path}: has no name for token {missing[0]}, of images or videos")
    return [names[id_] for id_ in ids]


class _Token(msgspec.Struct):
    id: Annotated[int, msgspec.Meta(ge=0)]
    content: str


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_Token] = []


def _added_tokens(path: Path) -> dict[str, int] | None:
    """Return the special tokens by name; None without the file."""
    if not path.is_file():
        return None
    try:
        read = msgspec.json.decode(read_bytes(path), type=_Tokenizer)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise ModelLoadError(f"{path}: is not a tokenizer") from None
    return {token.content: token.id for token in read.added_tokens}

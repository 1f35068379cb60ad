"""What the files beside tokenizer.json say: names of special tokens, and the ids that end a text.

They come with a model, so nothing in them is trusted: what cannot be meant is a ModelLoadError of
one line that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ModelLoadError

_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_CONFIG = "tokenizer_config.json"
# Without the suffix "Fast".
_ADDING_EOS = ("CodeLlamaTokenizer", "CohereTokenizer", "GemmaTokenizer", "LlamaTokenizer")


class _Token(msgspec.Struct):
    """An entry of ``added_tokens``; its other keys are of no use here."""

    id: int
    content: str


class _Added(msgspec.Struct):
    """The part of tokenizer.json that lists tokens outside of its vocabulary's text."""

    added_tokens: list[_Token] = []


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file.

    Raises:
        ModelLoadError: the file holds something else.
    """
    try:
        raw = path.read_bytes()
        value = json.loads(raw)
        if b"\\u" in raw:  # may be half of a surrogate pair, which is not text
            json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError:
        return {}
    except RecursionError:
        raise ModelLoadError(f"{path} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return value


def read_named_tokens(root: Path) -> dict[str, str]:
    """Spellings by name, such as ``{"bos_token": "<s>"}``. Raises ModelLoadError."""
    older, config = read_json(root / "special_tokens_map.json"), read_json(root / _CONFIG)
    return _spellings(older) | _spellings(config)


def read_special_tokens(root: Path) -> list[str]:
    """Spellings of the entries that are declared special. Raises ModelLoadError."""
    declared = read_json(root / _CONFIG).get("added_tokens_decoder") or {}
    found: list[str] = []
    for entry in declared.values() if isinstance(declared, dict) else [None]:
        text = entry.get("content") if isinstance(entry, dict) else None
        if entry is None or not isinstance(text, str):
            problem = "'added_tokens_decoder' must hold objects with a 'content' that is text"
            raise ModelLoadError(f"{root / _CONFIG}: {problem}")
        if entry and entry.get("special"):
            found.append(text)
    return found


def read_eos_token_ids(root: Path) -> set[int]:
    """Ids that end a text. Raises ModelLoadError."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json(root / name).get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(id_) is int for id_ in listed):
            problem = "'eos_token_id' must be a token id or a list of them"
            raise ModelLoadError(f"{root / name}: {problem}")
        ids.update(listed)
    return ids


def adds_eos(config: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer_config.json says that a text ends with eos.

    Its classes rewrote what tokenizer.json adds, up to transformers 4, which embedding models rely
    on whose vector is the state of that token (e5-mistral).
    """
    name = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    return config.get("add_eos_token") is True and name in _ADDING_EOS


def find_end_token_id(root: Path) -> int | None:
    """Return the id of the token that the tokenizer's own config ends texts with.

    None is returned, too, where there is none, and where the files are damaged, which those who
    tokenise report.
    """
    try:
        text = read_named_tokens(root).get("eos_token")
        declared = read_json(root / _CONFIG).get("added_tokens_decoder")
        path = root / "tokenizer.json"
        raw = path.read_bytes() if path.is_file() else b"{}"
        added = msgspec.json.decode(raw, type=_Added)
    except (ModelLoadError, OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    ids = {token.content: token.id for token in added.added_tokens}
    if isinstance(declared, dict):
        ids |= {
            entry["content"]: int(name)
            for name, entry in declared.items()
            if name.isdecimal()
            and isinstance(entry, dict)
            and isinstance(entry.get("content"), str)
        }
    return None if text is None else ids.get(text)


def read_named_templates(path: Path) -> dict[str, str]:
    """The chat templates in a JSON file, by name; one without a name is "default".

    Raises:
        ModelLoadError: there is something else in their place.
    """
    value = read_json(path).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, list):
        entries = [entry if isinstance(entry, dict) else {} for entry in value]
        named = [(entry.get("name"), entry.get("template")) for entry in entries]
    else:
        named = list(value.items()) if isinstance(value, dict) else [("default", value)]
    found: dict[str, str] = {}
    for name, text in named:
        if not isinstance(name, str) or not isinstance(text, str):
            raise ModelLoadError(f"{path}: 'chat_template' must be text, or templates by name")
        found[name] = text
    return found


def _spellings(config: dict[str, Any]) -> dict[str, str]:
    """Named special tokens of a config, which holds each as a string or as an object."""
    found: dict[str, str] = {}
    for name in _TOKEN_NAMES:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found

"""Reads ``tekken.json``, the vocabulary of Mistral's newer tokenizers.

It holds the pattern that cuts a text into words, the bytes of each token by rank, and the special
tokens, which have the first ids. Words are encoded as with tiktoken (``tiktoken_file.py``). Some
models, such as Voxtral, come with this file alone, and so without a chat template: their own
library writes prompts, in a form that ``TEMPLATE`` repeats for text and audio.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelLoadError
from engine.text.pieces import spell_bytes
from engine.text.tiktoken_file import merges
from engine.text.tokenizer_files import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

NAME = "tekken.json"
NAMED_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
_MAX_SPECIAL = 10_000
_TEMPLATE_VERSIONS = ("v7", "v11", "v13")  # of the form of prompts
TEMPLATE = (
    "{{ bos_token }}"
    "{%- if tools %}{{ raise_exception('tools are not supported without a chat template') }}"
    "{%- endif %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}[INST]"
    "{%- if message.content is string %}{{ message.content }}{%- else %}"
    "{%- for part in message.content %}"
    "{%- if part.type == 'audio' %}[BEGIN_AUDIO][AUDIO]"
    "{%- elif part.type == 'text' %}{{ part.text }}"
    "{%- else %}{{ raise_exception('only text and audio are supported') }}{%- endif %}"
    "{%- endfor %}{%- endif %}[/INST]"
    "{%- elif message.role == 'system' %}[SYSTEM_PROMPT]{{ message.content }}[/SYSTEM_PROMPT]"
    "{%- elif message.role == 'assistant' and not message.tool_calls %}"
    "{{ message.content }}{{ eos_token }}"
    "{%- else %}{{ raise_exception('tools are not supported without a chat template') }}"
    "{%- endif %}{%- endfor %}"
)


def read_tekken(root: Path) -> Backend:
    """Return the tokenizer of a directory with a ``tekken.json``.

    Raises:
        ModelLoadError: the file is damaged, or of an early version that names no special tokens;
            one line.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    path = root / NAME
    value = read_json(path)
    config = value.get("config")
    pattern = config.get("pattern") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(pattern, str):
        raise ModelLoadError(f"{path}: 'config' must hold a 'pattern'")
    num_special = _count(path, config, "default_num_special_tokens", _MAX_SPECIAL)
    size = _count(path, config, "default_vocab_size", 2**24) - num_special
    special = _special_tokens(path, value.get("special_tokens"), num_special)
    ranks = _ranks(path, value.get("vocab"), size)
    # Special tokens come first.
    vocabulary = {text: id_ for id_, text in enumerate(special)}
    vocabulary |= {spell_bytes(token): num_special + rank for token, rank in ranks.items()}
    if len(vocabulary) != num_special + size:
        raise ModelLoadError(f"{path}: a special token is spelled as another token")
    joined = [(spell_bytes(left), spell_bytes(right)) for left, right in merges(ranks)]
    backend = Tokenizer(models.BPE(vocabulary, joined, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in special]
    )
    return backend


def find_template(root: Path) -> dict[str, str]:
    """Return the chat template of a directory with a ``tekken.json`` whose form of prompts is
    known; else none."""
    config = read_json(root / NAME).get("config")
    version = config.get("version") if isinstance(config, dict) else None
    return {"default": TEMPLATE} if version in _TEMPLATE_VERSIONS else {}


def _count(path: Path, config: dict[str, Any], key: str, limit: int) -> int:
    found = config.get(key)
    if type(found) is not int or not 0 < found < limit:
        raise ModelLoadError(f"{path}: 'config' must hold a number '{key}'")
    return found


def _special_tokens(path: Path, entries: Any, count: int) -> list[str]:
    """Return the spellings of the first ids."""
    if not isinstance(entries, list) or not entries:
        raise ModelLoadError(f"{path}: names no special tokens; it needs a tokenizer.json")
    spellings = [f"<SPECIAL_{id_}>" for id_ in range(count)]
    for entry in entries:
        rank = entry.get("rank") if isinstance(entry, dict) else None
        text = entry.get("token_str") if isinstance(entry, dict) else None
        if type(rank) is not int or not 0 <= rank < count or not isinstance(text, str) or not text:
            raise ModelLoadError(f"{path}: 'special_tokens' has an odd entry {entry!r:.60}")
        spellings[rank] = text
    if len(set(spellings)) < count:
        raise ModelLoadError(f"{path}: 'special_tokens' has a token twice")
    return spellings


def _ranks(path: Path, entries: Any, size: int) -> dict[bytes, int]:
    """Return the rank of each token in use, in order."""
    ranks: dict[bytes, int] = {}
    try:
        for entry in entries[:size]:
            ranks[base64.b64decode(entry["token_bytes"], validate=True)] = entry["rank"]
    except (TypeError, KeyError, ValueError, binascii.Error):
        raise ModelLoadError(
            f"{path}: 'vocab' must hold tokens with their bytes and ranks"
        ) from None
    if list(ranks.values()) != list(range(size)):
        raise ModelLoadError(f"{path}: the ranks of 'vocab' are not 0, 1, 2 and so on, in order")
    if any(bytes((byte,)) not in ranks for byte in range(256)):
        raise ModelLoadError(f"{path}: some bytes are no tokens")
    return ranks

"""Reads tiktoken's vocabularies: a line for each token with its bytes in base 64 and its rank.

Encoding cuts a text into words by a pattern, and within a word merges the neighbours whose union
has the lowest rank, until no union is a token. The pattern is not in the file but in the model's
code, which is never run: it is known here for some models, and other files are refused. Kimi's code
also cuts runs of 25,000 characters without a space between them; here they are words as any other.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelLoadError
from engine.text.pieces import spell_bytes
from engine.text.tokenizer_files import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

NAME = "tiktoken.model"
_NUM_SPECIAL = 256  # ids after the vocabulary; those without a name are called reserved

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD, _ENDINGS = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI = "|".join(
    (
        *(r"[\p{Han}]+", f"{_LEAD}{_UPPER}*{_LOWER}+{_ENDINGS}"),
        *(f"{_LEAD}{_UPPER}+{_LOWER}*{_ENDINGS}", r"\p{N}{1,3}"),
        *(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    )
)
PATTERNS = {"kimi_k2": _KIMI, "kimi_k25": _KIMI}  # by model_type


def read_tiktoken(root: Path) -> Backend:
    """Return the tokenizer of a directory with a ``tiktoken.model``.

    Raises:
        ModelLoadError: the pattern is not known, or a file is damaged; one line.
    """
    kind = read_json(root / "config.json").get("model_type")
    pattern = PATTERNS.get(kind) if isinstance(kind, str) else None
    if pattern is None:
        raise ModelLoadError(
            f"{root}: a tiktoken file is not supported for this model, because the rule that cuts "
            "text into words is in the model's code, which is never run; it needs a tokenizer.json"
        )
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ranks = _read_ranks(root / NAME)
    vocabulary = {spell_bytes(token): rank for token, rank in ranks.items()}
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
        [AddedToken(text, normalized=False, special=True) for text in _special(root, len(ranks))]
    )
    return backend


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Return the rank of each token, which is its id, in order."""
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if list(ranks.values()) != list(range(len(ranks))):
        raise ModelLoadError(f"{path}: its ranks are not 0, 1, 2 and so on, in order")
    if any(bytes((byte,)) not in ranks for byte in range(256)):
        raise ModelLoadError(f"{path}: some bytes are no tokens")
    return ranks


def merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the pairs of tokens whose union is one, those of lower ranks first."""
    for token in ranks:
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        yield from sorted(
            (pair for pair in pairs if pair[0] in ranks and pair[1] in ranks),
            key=lambda pair: (ranks[pair[0]], ranks[pair[1]]),
        )


def _special(root: Path, first: int) -> list[str]:
    """Return the spellings of the ids from ``first`` on."""
    path = root / "tokenizer_config.json"
    declared: Any = read_json(path).get("added_tokens_decoder") or {}
    names: dict[str, Any] = {
        f"{number}": f"<|reserved_token_{number}|>" for number in range(first, first + _NUM_SPECIAL)
    }
    for number, entry in declared.items() if isinstance(declared, dict) else ():
        if number not in names or not isinstance(entry, dict):
            raise ModelLoadError(f"{path}: 'added_tokens_decoder' has an odd entry {number!r:.40}")
        names[number] = entry.get("content")
    spellings = list(names.values())
    if not all(isinstance(text, str) and text for text in spellings):
        raise ModelLoadError(f"{path}: 'added_tokens_decoder' must hold objects with a 'content'")
    if len(set(spellings)) < len(spellings):
        raise ModelLoadError(f"{path}: 'added_tokens_decoder' has a token twice")
    return spellings

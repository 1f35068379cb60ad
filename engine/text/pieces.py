"""Converts vocabulary entries to bytes, by reading the tokenizer's decoder as per-token rules.

Apart from the first characters of a text, the decoders of current language models treat each token
independently. Reading them as such rules makes decoding incremental and gives every token its exact
bytes:

    text = utf8_lossy(b"".join(rules.piece_bytes(token) for token in tokens)), less a leading space

Supported are byte-level BPE (Radford et al. 2019, GPT-2: each byte is spelled as a printable
character), SentencePiece (Kudo & Richardson 2018: a space is spelled ``▁`` and an unknown byte
``<0xAB>``), plain word-level vocabularies, and WordPiece (``##`` before a continuation within a
word). Everything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from engine.errors import ModelLoadError


class PieceRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a decoder does to each token, and to the beginning of a text."""

    byte_level: bool = False  # each character of a token stands for one byte
    byte_fallback: bool = False  # "<0xAB>" stands for one byte
    replacements: tuple[tuple[str, str], ...] = ()  # in order, within one token
    word_prefix: str = ""  # put before tokens that are whole words
    continuing_subword_prefix: str = ""  # prefix of tokens that continue a word
    lead: str = ""  # stripped from the beginning of a text ...
    max_lead: int = 0  # ... at most this many times

    def piece_bytes(self, token: str, *, added: bool = False) -> bytes:
        """The bytes that ``token`` adds to a text, other than at its beginning.

        Args:
            token: the vocabulary's spelling.
            added: whether it is an added token, whose spelling is its text.
        """
        if self.byte_level:
            values = None if added else [_BYTE_OF.get(char, -1) for char in token]
            if values is None or -1 in values:
                return token.encode()
            return bytes(values)
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token[-1] == ">":
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                pass
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.continuing_subword_prefix and token.startswith(self.continuing_subword_prefix):
            return token.removeprefix(self.continuing_subword_prefix).encode()
        return (self.word_prefix + token).encode()


def spell_bytes(token: bytes) -> str:
    """Spell bytes as byte-level BPE does, a printable character for each."""
    return "".join(_CHAR_OF[byte] for byte in token)


def read_rules(decoder: dict[str, Any] | None) -> PieceRules:
    """The rules of a ``tokenizer.json`` decoder.

    Raises:
        ModelLoadError: the decoder does something that is not a function of a single token.
    """
    if decoder is None:
        return PieceRules(word_prefix=" ", lead=" ", max_lead=1)
    rules = PieceRules()
    fused = False
    for step in _steps(decoder):
        kind = step.get("type")
        if kind == "ByteLevel":
            rules = msgspec.structs.replace(rules, byte_level=True)
        elif kind == "ByteFallback":
            rules = msgspec.structs.replace(rules, byte_fallback=True)
        elif kind == "Fuse":
            fused = True
        elif kind == "Replace" and not fused and "String" in step.get("pattern", {}):
            pair = (step["pattern"]["String"], step["content"])
            rules = msgspec.structs.replace(rules, replacements=(*rules.replacements, pair))
        elif kind == "Strip" and fused and not step.get("stop"):
            rules = msgspec.structs.replace(rules, lead=step["content"], max_lead=step["start"])
        elif kind == "WordPiece":  # without its clean-up of punctuation, which changes the text
            rules = msgspec.structs.replace(
                rules,
                word_prefix=" ",
                continuing_subword_prefix=step["prefix"],
                lead=" ",
                max_lead=1,
            )
        elif kind == "Metaspace":
            rules = _metaspace(rules, step)
        else:
            raise ModelLoadError(f"the tokenizer's decoder step '{kind}' is not supported here")
    return rules


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder.get("type") != "Sequence":
        yield decoder
        return
    for step in decoder.get("decoders", ()):
        yield from _steps(step)


def _metaspace(rules: PieceRules, step: dict[str, Any]) -> PieceRules:
    replacements = (*rules.replacements, (step["replacement"], " "))
    prepends = step.get("prepend_scheme", "always" if step.get("add_prefix_space") else "never")
    return msgspec.structs.replace(
        rules, replacements=replacements, lead=" ", max_lead=int(prepends != "never")
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + offset): byte for offset, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_CHAR_OF = {byte: char for char, byte in _BYTE_OF.items()}

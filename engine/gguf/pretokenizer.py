"""Pre-tokenisation rules of byte-level tokenizers, by llama.cpp's names.

The patterns are those of the models' own ``tokenizer.json``; the text between two matches is a word
too. Rules of unsupported models are missing.
"""

from __future__ import annotations

from typing import NamedTuple

DEFAULT_RULE = "default"  # of files without a rule's name


class PreTokenizerRule(NamedTuple):
    """Patterns, each applied to the results of the previous one."""

    patterns: tuple[str, ...]
    normalize_nfc: bool = False  # first, to Unicode's NFC
    ignore_merges: bool = False  # a word in the vocabulary is one token, whatever the merges
    add_bos: bool = False  # if the file does not say


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _cl100k(digits: str) -> str:
    """GPT-4's pattern; ``digits`` is the pattern of a number."""
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"{_ENDINGS}|{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _cased(digits: str, endings: str) -> str:
    """GPT-4o's pattern: words end where lower case turns to upper; ``digits`` and ``endings``
    are patterns."""
    return (
        rf"{_LEAD}{_UPPER}*{_LOWER}+{endings}|{_LEAD}{_UPPER}+{_LOWER}*{endings}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
    )


_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES,
)

_PLAIN = PreTokenizerRule((_GPT2,))
_DIGITS_APART = PreTokenizerRule((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizerRule((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizerRule((_cl100k(r"\p{N}"),))

RULES: dict[str, PreTokenizerRule] = {
    DEFAULT_RULE: PreTokenizerRule((_GPT2,)),
    "command-r": _DIGITS_APART,
    "dbrx": PreTokenizerRule((_cl100k(r"\p{N}{1,3}"),)),  # OLMo 2's and Phi-4's
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": PreTokenizerRule(_DEEPSEEK3),
    "gpt-2": _PLAIN,
    "gpt-4o": PreTokenizerRule((_cased(r"\p{N}{1,3}", rf"{_ENDINGS}?"),)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "mpt": _PLAIN,
    "olmo": _PLAIN,
    "phi-2": _PLAIN,
    "qwen2": _QWEN2._replace(normalize_nfc=True),
    "refact": _DIGITS_APART,  # Granite's
    "smaug-bpe": PreTokenizerRule((_cl100k(r"\p{N}{1,3}"),)),
    "smollm": _DIGITS_APART,
    "stablelm2": _QWEN2,
    "starcoder": _DIGITS_APART,
    "tekken": PreTokenizerRule((_cased(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
}

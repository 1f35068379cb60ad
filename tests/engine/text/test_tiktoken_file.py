"""Kimi's tokenizer from its tiktoken file, by tiktoken's algorithm written out."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelLoadError
from engine.text.tiktoken_file import PATTERNS
from engine.text.tokenizer import Tokenizer

WORDS = (
    *("th", "he", "the", "in", "ing", " t", " the", " th", "er", "Th", "The", "ll", "'l", "'ll"),
    *("aa", "aaa", "aaaa", "12", "123", "\r\n", "\n\n", "  ", "   ", " (", "é", "не", "не т"),
    *("中", "中文", "文", "字", "ab", "bc", "abc", "X!", "!!", "??", ".\n"),
)


def _tokens() -> list[bytes]:
    found = [bytes((byte,)) for byte in range(256)]
    for word in WORDS:
        spelt = word.encode()
        for end in range(2, len(spelt) + 1):  # so that every token can be reached
            if spelt[:end] not in found:
                found.append(spelt[:end])
    return found


TOKENS = _tokens()
RANKS = {token: rank for rank, token in enumerate(TOKENS)}
FIRST = len(TOKENS)


def write(root: Path, **changes: object) -> Path:
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in RANKS.items())
    (root / "tiktoken.model").write_text("".join(lines))
    declared = {
        f"{FIRST}": {"content": "[BOS]", "special": True},
        f"{FIRST + 1}": {"content": "[EOS]", "special": True},
        f"{FIRST + 9}": {"content": "<|im_end|>", "special": True},
    }
    config = {"added_tokens_decoder": declared, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    code = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    config |= {"tokenizer_class": "TikTokenTokenizer", "auto_map": code, **changes}
    (root / "tokenizer_config.json").write_text(json.dumps(config))
    (root / "config.json").write_text(json.dumps({"model_type": "kimi_k2"}))
    return root


@pytest.fixture(scope="module")
def kimi(tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_dir(write(tmp_path_factory.mktemp("kimi")))


def encoded(text: str) -> list[int]:
    found: list[int] = []
    for word in regex.findall(PATTERNS["kimi_k2"], text, flags=regex.V1):
        parts = [bytes((byte,)) for byte in word.encode()]
        while word.encode() not in RANKS:
            unions = [a + b for a, b in itertools.pairwise(parts)]
            known = [union for union in unions if union in RANKS]
            if not known:
                break
            at = unions.index(min(known, key=RANKS.__getitem__))
            parts[at : at + 2] = [unions[at]]
        else:
            parts = [word.encode()]
        found += [RANKS[part] for part in parts]
    return found


_PIECES = st.sampled_from([*WORDS, *"aAbXé中字 \n\t1!'", "DON'T", "ſ", "ー", "𠀀", "😀"])


@given(st.lists(_PIECES, max_size=12).map("".join))
@settings(max_examples=300, deadline=None)
def test_texts_are_cut_and_merged_as_tiktoken_does(kimi: Tokenizer, text: str) -> None:
    ids = kimi.encode(text)
    assert ids == encoded(text)
    assert kimi.decode(ids) == text


def test_special_tokens_have_the_ids_after_the_vocabulary(kimi: Tokenizer) -> None:
    assert kimi.vocab_size == FIRST + 256
    assert (kimi.bos_token_id, kimi.eos_token_ids) == (FIRST, (FIRST + 1,))
    spelt = f"the<|im_end|><|reserved_token_{FIRST + 5}|>"
    assert kimi.encode(spelt, parse_special=True) == [RANKS[b"the"], FIRST + 9, FIRST + 5]
    assert FIRST + 9 not in kimi.encode(spelt)
    assert set(range(FIRST, FIRST + 256)) == kimi.special_ids


def test_the_rule_of_another_model_is_not_known(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_linear"}))
    with pytest.raises(ModelLoadError, match=r"tiktoken file is not supported for this model.*the"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("aGU= 0 1\n", "cannot be read"),
        ("a?U= 0\n", "cannot be read"),
        ("aGU= x\n", "cannot be read"),
        ("aGU= 1\n", "its ranks are not 0, 1, 2"),
        ("aGU= 0\n", "some bytes are no tokens"),
    ],
)
def test_a_damaged_file_is_told_in_one_line(tmp_path: Path, content: str, words: str) -> None:
    (write(tmp_path) / "tiktoken.model").write_text(content)
    with pytest.raises(ModelLoadError, match=words) as caught:
        Tokenizer.from_dir(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"7": {"content": "x"}}, "odd entry '7'"),
        ({f"{FIRST}": {"content": ""}}, "must hold objects with a 'content'"),
        ({f"{FIRST + i}": {"content": "x"} for i in range(2)}, "has a token twice"),
    ],
)
def test_special_tokens_that_cannot_be_meant_are_told(tmp_path: Path, declared, words) -> None:
    with pytest.raises(ModelLoadError, match=words):
        Tokenizer.from_dir(write(tmp_path, added_tokens_decoder=declared))

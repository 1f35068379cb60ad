"""A ``tekken.json`` becomes a tokenizer and a template: ids as Mistral's own library gives them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelLoadError, TemplateError
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer

NUM_SPECIAL = 40
SPECIAL = {
    **{0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 17: "[SYSTEM_PROMPT]"},
    **{18: "[/SYSTEM_PROMPT]", 24: "[AUDIO]", 25: "[BEGIN_AUDIO]", 34: "[TRANSCRIBE]"},
}
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MORE = (b"he", b"ll", b"hell", b"hello", b" w", b"unused")  # the last is beyond the vocabulary


def tekken(**changes: Any) -> dict[str, Any]:
    tokens = [*(bytes((byte,)) for byte in range(256)), *MORE]
    return {
        "config": {
            **{"pattern": PATTERN, "version": "v13", "num_vocab_tokens": len(tokens)},
            "default_vocab_size": NUM_SPECIAL + len(tokens) - 1,
            "default_num_special_tokens": NUM_SPECIAL,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True} for rank, text in SPECIAL.items()
        ],
        **changes,
    }


def save(directory: Path, value: dict[str, Any]) -> Path:
    (directory / "tekken.json").write_text(json.dumps(value))
    return directory


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_dir(save(tmp_path, tekken()))


@pytest.fixture
def template(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[ChatTemplate]:
    made = ChatTemplate.from_dir(tmp_path, tokenizer)
    yield made
    made.close()


def ids(*tokens: bytes) -> list[int]:
    every = [*(bytes((byte,)) for byte in range(256)), *MORE]
    return [NUM_SPECIAL + every.index(token) for token in tokens]


def test_words_are_joined_by_rank(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hello", add_special_tokens=False) == ids(b"hello")
    assert tokenizer.encode("hellx", add_special_tokens=False) == ids(b"hell", b"x")
    found = tokenizer.encode("x wé", add_special_tokens=False)
    assert found == ids(b"x", b" w", b"\xc3", b"\xa9")
    assert tokenizer.decode(found) == "x wé"
    apart = ids(*(bytes((byte,)) for byte in b"unused"))
    assert tokenizer.encode("unused", add_special_tokens=False) == apart
    assert tokenizer.vocab_size == NUM_SPECIAL + 256 + len(MORE) - 1


def test_special_tokens_come_first(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("h") == [1, *ids(b"h")]
    assert tokenizer.encode("[INST]", add_special_tokens=False, parse_special=True) == [3]
    assert 3 not in tokenizer.encode("[INST]")
    assert tokenizer.eos_token_ids == (2,)


def test_prompts_without_a_template_of_the_models_own(template: ChatTemplate) -> None:
    conversation = [
        {"role": "system", "content": "h"},
        {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "he"},
    ]
    wanted = [1, 17, *ids(b"h"), 18, 3, 25, 24, *ids(b"hello"), 4]
    wanted += [*ids(b"x"), 2, 3, *ids(b"he"), 4]
    assert template.encode_chat_sync(conversation) == wanted
    asked = [{"role": "user", "content": [{"type": "audio"}]}]
    found = template.encode_chat_sync(asked, lambda text: text + "he[TRANSCRIBE]")
    assert found == [1, 3, 25, 24, 4, *ids(b"he"), 34]
    for refused in (
        {"role": "user", "content": [{"type": "image"}]},
        {"role": "tool", "content": "x"},
    ):
        with pytest.raises(TemplateError):
            template.encode_chat_sync([refused])


def test_prompts_of_other_versions_are_not_guessed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    value = tekken()
    value["config"]["version"] = "v3"
    assert ChatTemplate.from_dir(save(tmp_path, value), tokenizer).source is None


@pytest.mark.parametrize(("changes", "words"), [
    ({"config": {}}, "must hold a 'pattern'"),
    ({"config": {"pattern": "x"}}, "default_num_special_tokens"),
    ({"special_tokens": None}, "names no special tokens"),
    ({"special_tokens": [{"rank": 99, "token_str": "x"}]}, "odd entry"),
    ({"special_tokens": [{"rank": rank, "token_str": "x"} for rank in (1, 2)]}, "a token twice"),
    ({"special_tokens": [{"rank": 0, "token_str": "hello"}]}, "spelled as another"),
    ({"vocab": None}, "must hold tokens"),
    ({"vocab": tekken()["vocab"][::-1]}, "0, 1, 2 and so on"),
])  # fmt: skip
def test_damaged_files(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        Tokenizer.from_dir(save(tmp_path, tekken(**changes)))

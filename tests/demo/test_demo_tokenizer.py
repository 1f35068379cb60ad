"""The tokenizer round-trips any text, and its added tokens are where parsers expect them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from demo.evaluate import MODEL
from demo.tokenizer import IM_END, MARKS, SPECIAL, VOCAB_SIZE, load_tokenizer

TOKENIZER = load_tokenizer(MODEL)
NASTY = [
    "",
    " ",
    "   two  spaces   ",
    "\n\r\n\t\x00\x7f\x85\u2028",
    "naïve café — “quotes” … ½",
    "日本語のテキスト、中文字符，한국어",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 🇸🇪 pair, 👍🏽 tone",
    "e\u0301 combining, \u200d joiner, \ufeff mark, \ufffd replacement",
    "עברית و العربية",
    "𝕏 𐍈 \U0010ffff \ue000",
    "Ã© Â£ â€™ mojibake",
    "<|im_start|x <tool_cal> <|im_end",
    '{"a": [1, 2.50, -3e10], "b": "\\u00e9\\n"}',
    "0123456789 007 3.14159",
]


@pytest.mark.parametrize("text", NASTY)
def test_nasty_text_round_trips(text: str) -> None:
    assert _round_trip(text) == text


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    assert _round_trip(text) == text


@given(st.binary(max_size=64))
def test_any_bytes_read_as_latin_1_round_trip(data: bytes) -> None:
    text = data.decode("latin-1")
    assert _round_trip(text) == text


def test_the_byte_alphabet_is_complete() -> None:
    vocab = TOKENIZER.get_vocab()
    assert all(byte in vocab for byte in pre_tokenizers.ByteLevel.alphabet())
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE
    assert sorted(vocab.values()) == list(range(VOCAB_SIZE))


def test_special_tokens_vanish_and_marks_survive_decoding() -> None:
    text = "<tool_call>\n{}\n</tool_call><|im_end|>"
    ids = TOKENIZER.encode(text).ids
    assert ids[-1] == IM_END
    assert TOKENIZER.decode(ids) == "<tool_call>\n{}\n</tool_call>"
    for mark in SPECIAL + MARKS:
        assert len(TOKENIZER.encode(mark).ids) == 1


def test_digits_stand_alone() -> None:
    tokens = TOKENIZER.encode("what is 1234 + 56?").tokens
    assert [t for t in tokens if any(c.isdigit() for c in t)] == list("123456")


def _round_trip(text: str) -> str:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    return TOKENIZER.decode(ids, skip_special_tokens=False)

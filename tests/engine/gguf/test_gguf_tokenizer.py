"""Tokenizers from GGUF files give the same ids as their sources."""

from __future__ import annotations

import itertools
import json
import random

import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.errors import ModelLoadError
from engine.gguf.pretokenizer import RULES
from engine.paths import default_model_dir
from engine.text import tokenizer as text
from engine.text.template import ChatTemplate
from tests import gguf_files

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# As in the models' own tokenizer.json.
LLAMA3 = (
    _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
BY_NAME = {
    "gpt-2": (None, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)),
    "llama-bpe": (None, LLAMA3),
    "qwen2": (normalizers.NFC(), QWEN2),
    "smollm": (
        None,
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        ),
    ),
}


WORDS = "the Capital I'LL they're 12345 007 x=1; ... naïve e\u0301 東京 привет 🙂 👩‍👩‍👧 ß ½"
BETWEEN = (" ", "  ", "\n", "\n\n", "\t", " \n ", "", "", "   ")


def corpus(count: int = 300) -> list[str]:
    """Texts of words, numbers, spaces, marks and scripts in any order."""
    chosen = random.Random(5)
    words = WORDS.split(" ")
    texts = []
    for _ in range(count):
        parts = [chosen.choice(words) + chosen.choice(BETWEEN) for _ in range(chosen.randrange(13))]
        texts.append(chosen.choice(BETWEEN) + "".join(parts))
    return texts


def made(tmp_path, fill) -> text.Tokenizer:
    """The tokenizer of a file with nothing else."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    fill(writer)
    gguf_files.finish(writer)
    return text.Tokenizer.from_dir(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", BY_NAME)
def test_byte_level_ids_equal_the_source(tmp_path, name):
    normalizer, words = BY_NAME[name]
    source = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    if isinstance(words, str):
        words = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(words), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    source.pre_tokenizer, source.decoder = words, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=alphabet,
        special_tokens=["<|begin|>", "<|im_end|>"],
        show_progress=False,
    )
    source.train_from_iterator(corpus(), trainer)
    if normalizer is not None:
        source.normalizer = normalizer

    def fill(writer):
        gguf_files.add_byte_level(writer, json.loads(source.to_str()), name)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)

    found = made(tmp_path, fill)
    for line in corpus():
        expected = source.encode(line).ids
        ids = found.encode(line)
        assert ids == ([0, *expected] if name == "llama-bpe" else expected), line
        assert found.decode(ids) == source.decode(expected)
    assert found.encode("<|im_end|>", parse_special=True)[-1] == 1
    assert 1 not in found.encode("<|im_end|>")
    assert found.eos_token_ids == (0, 1)  # the one declared, and the end of turn by its spelling


def sentencepiece(line: str, scores: dict[str, float], ids: dict[str, int], *, prefix: bool):
    """SentencePiece's algorithm: repeatedly merge the neighbours with the best-scoring union."""
    line = line.replace(" ", "▁")
    symbols = list(("▁" if prefix and line else "") + line)
    while True:
        unions = [a + b for a, b in itertools.pairwise(symbols)]
        best = max(
            (at for at, union in enumerate(unions) if union in scores),
            key=lambda at: (scores[unions[at]], -at),
            default=None,
        )
        if best is None:
            break
        symbols[best : best + 2] = [unions[best]]
    for symbol in symbols:
        if symbol in ids:
            yield ids[symbol]
        else:
            yield from (ids[f"<0x{byte:02X}>"] for byte in symbol.encode())


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_follow_the_scores(tmp_path, prefix):
    chosen = random.Random(9)
    letters = sorted({char for line in corpus() for char in line.replace(" ", "▁")} - set("🙂½"))
    pieces = {char: -1000.0 - i for i, char in enumerate(letters)}
    for line in corpus():
        line = line.replace(" ", "▁")
        for _ in range(3):
            at = chosen.randrange(len(line) + 1)
            piece = line[at : at + chosen.randint(2, 6)]
            if set(piece) <= set(letters):  # pieces consist only of letters
                for end in range(2, len(piece) + 1):  # with all intermediate pieces
                    pieces.setdefault(piece[:end], -float(len(pieces)))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]

    def fill(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * 259 + list(pieces.values()))
        writer.add_token_types(types)
        writer.add_add_space_prefix(prefix)

    found = made(tmp_path, fill)
    ids = {token: id_ for id_, token in enumerate(tokens)}
    for line in corpus():
        assert found.encode(line) == [1, *sentencepiece(line, pieces, ids, prefix=prefix)], line
        assert found.decode(found.encode(line)) == line
    assert found.eos_token_ids == (2,)  # SentencePiece's default


def test_unigram_ids_are_the_most_likely_pieces(tmp_path):
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁ab", -3.0), ("a", -2.5), ("b", -2.5), ("c", -9.0)]
    pieces += [("bc", -4.0), ("</s>", 0.0)]

    def fill(writer):
        writer.add_tokenizer_model("t5")
        writer.add_token_list([piece for piece, _ in pieces])
        writer.add_token_scores([score for _, score in pieces])
        writer.add_token_types([2, 1, 1, 1, 1, 1, 1, 3])
        writer.add_unk_token_id(0)
        writer.add_eos_token_id(7)
        writer.add_add_bos_token(False)
        writer.add_add_eos_token(True)

    found = made(tmp_path, fill)
    # ▁ab + c costs 12, ▁ + a + bc 8.5
    assert found.encode("abc") == [1, 3, 6, 7]
    assert found.encode("ab", add_special_tokens=False) == [2]


def test_a_tokenizer_json_is_taken_as_it_is(tmp_path):
    directory = default_model_dir()
    found = made(tmp_path, lambda writer: gguf_files.add_tokenizer(writer, directory, "unheard-of"))
    source = text.Tokenizer.from_dir(directory)
    for line in corpus():
        assert found.encode(line) == source.encode(line)
    assert found.named_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert found.eos_token_ids == source.eos_token_ids
    template = ChatTemplate.from_dir(tmp_path / "model.gguf", found)
    assert template.source == ChatTemplate.from_dir(directory, source).source
    template.close()


def test_templates_come_by_name(tmp_path):
    directory = default_model_dir()
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_chat_template(
        [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    )
    source = json.loads((directory / "tokenizer.json").read_text())
    gguf_files.add_byte_level(writer, source, "gpt-2")
    gguf_files.finish(writer)
    tokenizer = text.Tokenizer.from_dir(tmp_path)  # a directory with a single file
    template = ChatTemplate.from_dir(tmp_path, tokenizer)
    assert template.templates == {"default": "plain", "tool_use": "with tools"}
    template.close()


def test_every_rule_is_a_pattern():
    for rule in RULES.values():
        for pattern in rule.patterns:
            split = pre_tokenizers.Split(Regex(pattern), "isolated")
            line = " Hello, world's 12345\n\n x"
            assert "".join(part for part, _ in split.pre_tokenize_str(line)) == line


BAD = {
    "no tokenizer": (lambda writer: None, "of kind 'none' is not supported"),
    "unknown kind": (lambda writer: writer.add_tokenizer_model("rwkv"), "of kind 'rwkv'"),
    "no tokens": (lambda writer: writer.add_tokenizer_model("gpt2"), "tokens' has 0 tokens"),
    "unknown rule": (
        lambda writer: (
            writer.add_tokenizer_model("gpt2"),
            writer.add_token_list(["a"]),
            writer.add_tokenizer_pre("elvish"),
        ),
        "'tokenizer.ggml.pre' is 'elvish'; known: ",
    ),
    "merge of no token": (
        lambda writer: (
            writer.add_tokenizer_model("gpt2"),
            writer.add_token_list(["a", "b"]),
            writer.add_token_merges(["a b"]),
        ),
        "merges' has 'a b', which makes no token",
    ),
    "no scores": (
        lambda writer: (writer.add_tokenizer_model("llama"), writer.add_token_list(["a"])),
        "scores' has 0 for 1 tokens",
    ),
    "id out of range": (
        lambda writer: (
            writer.add_tokenizer_model("llama"),
            writer.add_token_list(["a"]),
            writer.add_token_scores([0.0]),
            writer.add_eos_token_id(5),
        ),
        "eos_token_id' must be one of 1 tokens, not 5",
    ),
    "tokens are numbers": (
        lambda writer: (
            writer.add_tokenizer_model("llama"),
            writer.add_array("tokenizer.ggml.tokens", [1, 2]),
        ),
        "tokens' must be a list of strings",
    ),
    "damaged tokenizer.json": (
        lambda writer: (
            writer.add_tokenizer_model("llama"),
            writer.add_token_list(["a"]),
            writer.add_string("tokenizer.huggingface.json", "{"),
        ),
        "the tokenizer cannot be made: ",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_made_is_refused(tmp_path, name):
    fill, message = BAD[name]
    with pytest.raises(ModelLoadError, match=message) as caught:
        made(tmp_path, fill)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)

"""Embedding models whose vector is the state of an end token that only a config asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from engine.text.tokenizer import Tokenizer
from engine.text.truncation import encode_texts

WORDS = ["<unk>", "<s>", "</s>", "the", "cat", "sat"]


def tokenizer(directory: Path, **config: object) -> Tokenizer:
    """As e5-mistral's: tokenizer.json adds bos alone."""
    backend = Backend(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(WORDS[:3])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**named, **config}))
    return Tokenizer.from_dir(directory)


def test_a_text_to_be_pooled_ends_as_the_config_says(tmp_path: Path) -> None:
    found = tokenizer(tmp_path, add_eos_token=True)
    assert encode_texts(found, ["the cat", "sat"]) == [[1, 3, 4, 2], [1, 5, 2]]
    # The end of the text is cut, not what stands around it.
    assert encode_texts(found, ["the cat sat the cat"], 4) == [[1, 3, 4, 2]]
    assert encode_texts(found, ["the cat"], add_special_tokens=False) == [[3, 4]]
    # A prompt that is continued has no end.
    assert found.encode("the cat") == [1, 3, 4]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_eos_token": False},
        # A class of transformers that never did what this key says.
        {"add_eos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"},
    ],
)
def test_other_texts_end_as_tokenizer_json_says(tmp_path: Path, config: dict[str, object]) -> None:
    assert encode_texts(tokenizer(tmp_path, **config), ["the cat"]) == [[1, 3, 4]]


def test_an_end_that_tokenizer_json_adds_is_not_doubled(tmp_path: Path) -> None:
    tokenizer(tmp_path, add_eos_token=True)
    file = tmp_path / "tokenizer.json"
    backend = Backend.from_file(str(file))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    backend.save(str(file))
    assert encode_texts(Tokenizer.from_dir(tmp_path), ["the cat"]) == [[1, 3, 4, 2]]

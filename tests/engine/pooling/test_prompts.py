"""Prompts of sentence-transformers' files: named by a call, or the model's default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LLM
from engine.errors import InvalidParameter, ModelLoadError
from engine.models.sentence_transformers import read_sentence_config
from engine.pooling import relevance
from tests import tiny_encoders
from tests.engine.pooling.drive import load

PROMPTS = {"query": "the cat: ", "document": ""}


def configure(directory: Path, **config: Any) -> Path:
    """Write config_sentence_transformers.json beside a tiny encoder."""
    (directory / "config_sentence_transformers.json").write_text(json.dumps(config))
    return directory


def save(directory: Path, *, num_labels: int = 0) -> Path:
    tiny_encoders.save("bert", directory, num_labels=num_labels)
    tiny_encoders.save_tokenizer(directory)
    return directory


def vectors(llm: LLM, *texts: Any, **arguments: Any) -> list[np.ndarray]:
    return [result.embedding for result in llm.embed(list(texts), **arguments)]


def open_llm(directory: Path) -> LLM:
    return LLM(directory, num_threads=1, use_tqdm=False, dtype="float32")


def test_a_named_prompt_stands_before_each_text(tmp_path: Path) -> None:
    configure(save(tmp_path), prompts=PROMPTS, default_prompt_name=None)
    with open_llm(tmp_path) as llm:
        plain = vectors(llm, "a dog", "the sun", "the cat: a dog", "the cat: the sun")
        asked = vectors(llm, "a dog", "the sun", prompt_name="query")
        np.testing.assert_allclose(asked, plain[2:], atol=1e-5)
        assert not np.allclose(asked, plain[:2], atol=1e-3)
        np.testing.assert_allclose(
            vectors(llm, "a dog", prompt_name="document"), plain[:1], atol=1e-5
        )
        with pytest.raises(
            InvalidParameter, match="'passage': its prompts are 'query', 'document'"
        ):
            llm.embed("a dog", prompt_name="passage")
        with pytest.raises(InvalidParameter, match="token ids"):
            llm.embed([5, 6], prompt_name="query")


def test_the_models_default_prompt_stands_before_every_text_unless_another_is_named(
    tmp_path: Path,
) -> None:
    configure(save(tmp_path), prompts=PROMPTS, default_prompt_name="query")
    with open_llm(tmp_path) as llm:
        (default,) = vectors(llm, "a dog")
        (bare,) = vectors(llm, "a dog", prompt_name="")
        (asked, doubled) = vectors(llm, "the cat: a dog", "a dog", prompt_name="")
        np.testing.assert_allclose(default, asked, atol=1e-5)
        np.testing.assert_allclose(bare, doubled, atol=1e-5)
        assert not np.allclose(default, bare, atol=1e-3)
        (by_ids,) = vectors(llm, llm.encode("a dog"))  # used as they are
        assert not np.allclose(by_ids, default, atol=1e-3)
        (score,) = llm.score("a dog", ["the sun"])
        (sun,) = vectors(llm, "the sun")
        assert score == pytest.approx(float(default @ sun), abs=1e-5)


def test_a_prompt_that_is_left_out_of_the_pooling_is_refused(tmp_path: Path) -> None:
    """Its tokens would belong to the mean here."""
    configure(save(tmp_path), prompts=PROMPTS)
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"pooling_mode_mean_tokens": True, "include_prompt": False}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with open_llm(tmp_path) as llm:
        assert len(llm.embed("a dog")) == 1
        with pytest.raises(InvalidParameter, match="out of its pooling"):
            llm.embed("a dog", prompt_name="query")


def test_a_prompt_may_be_null_and_is_then_empty(tmp_path: Path) -> None:
    found = read_sentence_config(configure(tmp_path, prompts={"document": None, "query": "q: "}))
    assert found.prompts == {"document": "", "query": "q: "}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"prompts": {"query": 1}}, "prompts"),
        ({"prompts": ["query"]}, "prompts"),
        ({"prompts": {"query": "q"}, "default_prompt_name": "passage"}, "default_prompt_name"),
        ({"activation_fn": "torch.nn.modules.activation.Softmax"}, "activation_fn.*Softmax"),
    ],
)
def test_damaged_files_are_errors(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        read_sentence_config(configure(tmp_path, **config))


def test_texts_in_lower_case_where_the_file_says_so(tmp_path: Path) -> None:
    """sentence-transformers lowers texts itself; this tokenizer would not."""
    file = save(tmp_path) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["normalizer"]["lowercase"] = False
    file.write_text(json.dumps(tokenizer))
    (tmp_path / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 64, "do_lower_case": True})
    )
    with open_llm(tmp_path) as llm:
        upper, lower = vectors(llm, "The Cat", "the cat")
        np.testing.assert_allclose(upper, lower, atol=1e-6)


def test_the_activation_of_scores_is_read_where_newer_versions_write_it(tmp_path: Path) -> None:
    """Before 5.4 it was in config.json, and it still is in older models."""
    save(tmp_path, num_labels=1)
    assert relevance(3.0, load(tmp_path).info.pooling) < 1.0
    configure(tmp_path, activation_fn="torch.nn.modules.linear.Identity", model_type="CrossEncoder")
    assert relevance(3.0, load(tmp_path).info.pooling) == 3.0

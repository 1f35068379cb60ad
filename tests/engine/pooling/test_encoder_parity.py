"""Encoders: vectors and scores equal Hugging Face's, alone and in batches of many lengths."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from engine.errors import ContextLengthExceeded, InvalidParameter, ModelLoadError
from engine.models.encoder.families import ENCODERS
from engine.models.families.embedding_gemma import BIDIRECTIONAL, EMBEDDING_GEMMAS
from engine.pooling import PoolingParams
from engine.types import Request
from tests import tiny_encoders
from tests.engine.pooling.drive import embed, load

LENGTHS = (128, 3, 17, 18, 19, 1, 60, 17)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 160, (n,), generator=generator).tolist() for n in lengths]


def states(model, prompt: list[int]) -> torch.Tensor:
    """Hugging Face's hidden states, [tokens, hidden_size]."""
    with torch.no_grad():
        return model(torch.tensor([prompt])).last_hidden_state[0]


@pytest.mark.parametrize("kind", tiny_encoders.KINDS)
def test_vectors_equal_hugging_face(tmp_path, kind):
    model = tiny_encoders.save(kind, tmp_path)
    core, texts = load(tmp_path), prompts(*LENGTHS)
    assert (core.info.max_model_len, core.info.pooling.kind) == (128, "mean")
    expected = [states(model, text) for text in texts]
    for pooling, pool in (("mean", lambda h: h.mean(0)), ("cls", lambda h: h[0])):
        params = PoolingParams(kind=pooling, normalize=False)
        together = embed(core, texts, params)
        for index, hidden in enumerate(expected):
            np.testing.assert_allclose(together[index], pool(hidden).numpy(), atol=1e-4)
        alone = embed(core, texts[3:4], params)[0]
        np.testing.assert_allclose(alone, together[3], atol=1e-5)


WITHOUT_TYPES = ("distilbert", "mpnet", "modernbert", "modernbert_biases")
WITHOUT_TYPES += ("eurobert", "eurobert_biases")


@pytest.mark.parametrize(
    "kind", ["bert", "camembert", "xlm_roberta", "nomic_bert", "gte", *WITHOUT_TYPES]
)
def test_heads_score_as_hugging_face_does(tmp_path, kind):
    model = tiny_encoders.save(kind, tmp_path, num_labels=1)
    core, texts = load(tmp_path), prompts(12, 40, 33)
    assert core.info.pooling.num_labels == 1
    for text in texts:
        types = torch.tensor([[0] * 9 + [int(kind != "gte")] * (len(text) - 9)])
        inputs = {} if kind in WITHOUT_TYPES else {"token_type_ids": types}
        with torch.no_grad():
            expected = model(torch.tensor([text]), **inputs).logits[0]
        params = PoolingParams(use_score_head=True, second_start=9)
        np.testing.assert_allclose(embed(core, [text], params)[0], expected.numpy(), atol=1e-4)


def test_every_family_has_a_twin():
    import transformers

    classes = (config_class for config_class, _ in tiny_encoders.KINDS.values())
    twins = {getattr(transformers, name).model_type for name in classes}
    known = {*ENCODERS, *BIDIRECTIONAL, *EMBEDDING_GEMMAS}
    # GTE by another name, and a config around that of the text model.
    assert twins == known - {"new", "embedding_gemma2"}


def test_old_names_of_norms_and_heads_of_training_are_read(tmp_path):
    """As in the first BERT checkpoints: gamma and beta, and a head for masked words."""
    import safetensors.torch

    model = tiny_encoders.save("bert", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in tensors.items():
        for new, older in old.items():
            name = name.replace(new, older)
        renamed[f"bert.{name}"] = tensor
    renamed["cls.predictions.bias"] = torch.zeros(160)
    safetensors.torch.save_file(renamed, path)
    (text,) = prompts(20)
    vector = embed(load(tmp_path), [text], PoolingParams(kind="mean", normalize=False))[0]
    np.testing.assert_allclose(vector, states(model, text).mean(0).numpy(), atol=1e-4)


def test_what_an_encoder_cannot_do_is_refused(tmp_path):
    tiny_encoders.save("bert", tmp_path)
    core = load(tmp_path)
    with pytest.raises(InvalidParameter, match="does not generate"):
        core.add(Request(id="a", prompt_token_ids=(3,)))
    with pytest.raises(ContextLengthExceeded):
        core.add(Request(id="a", prompt_token_ids=(3,) * 129, pooling=PoolingParams()))
    for changes in (
        {"batch_invariant": True},
        {"attention_backend": "reference"},
        {"max_model_len": 129},
    ):
        with pytest.raises(ModelLoadError):
            load(tmp_path, **changes)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value in (("is_decoder", True), ("hidden_act", "mish"), ("add_cross_attention", True)):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ModelLoadError, match=key):
            load(tmp_path)


def test_sentence_transformers_tells_pooling_and_length(tmp_path):
    model = tiny_encoders.save("bert", tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [{"type": f"sentence_transformers.models.{k}", "path": path} for k, path in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    core = load(tmp_path)
    pooling = core.info.pooling
    assert (pooling.kind, pooling.normalize, core.info.max_model_len) == ("cls", True, 64)
    assert load(tmp_path, max_model_len=100).info.max_model_len == 100
    (text,) = prompts(30)
    expected = states(model, text)[0]
    vector = embed(core, [text], PoolingParams(kind=pooling.kind))[0]
    np.testing.assert_allclose(vector, (expected / expected.norm()).numpy(), atol=1e-5)

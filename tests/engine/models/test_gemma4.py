"""Gemma 4: supported configs, and its layers with different heads on each backend."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.models.checkpoint import read_config
from engine.runner import load_runner
from tests import tiny_models
from tests.engine.models.test_parity import paged_logits, prompt


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(directory, Hugging Face's logits for the test's prompt)."""
    return saved("gemma4", tmp_path_factory)


@pytest.fixture(scope="module", params=["gemma4", "gemma4_moe", "gemma4_shared"])
def either(request, tmp_path_factory):
    """The same for a model with experts, and for one with embeddings and shared keys."""
    return saved(request.param, tmp_path_factory)


def saved(kind, tmp_path_factory):
    model = tiny_models.build(kind)
    directory = tmp_path_factory.mktemp(kind)
    model.save_pretrained(directory)
    with torch.no_grad():
        return directory, model(torch.tensor([prompt()])).logits[0]


def changed(directory, **changes) -> dict:
    """A config with some keys changed; None removes a key."""
    config = json.loads((directory / "config.json").read_text()) | changes
    return {key: value for key, value in config.items() if value is not None}


def spec_of(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_config(str(tmp_path)).spec


def test_the_reference_says_what_hugging_face_says(either):
    directory, expected = either
    logits = paged_logits(directory, attention_backend="reference")
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunks", [(50,), (1,) * 50, (12, 12, 12, 14)])
def test_a_prompt_may_come_in_any_chunks(either, chunks):
    directory, expected = either
    logits = paged_logits(directory, chunks=chunks)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def likeness(directory, expected, **changes) -> float:
    logits = paged_logits(directory, **changes).float()
    return torch.cosine_similarity(logits, expected, dim=-1).mean().item()


def test_weights_may_be_rounded_as_they_load(either):
    """With keys that double as values: the same codes, twice."""
    assert likeness(*either, quantization="int8", dtype="bfloat16") > 0.99


def test_four_bits(tiny):
    """With experts it would change which of them are chosen."""
    assert likeness(*tiny, quantization="int4", dtype="bfloat16") > 0.9


@pytest.mark.parametrize("codes", ["int8", "fp8"])
def test_a_cache_of_codes_has_scales_for_each_kind_of_heads(tiny, codes):
    assert likeness(*tiny, cache_dtype=codes) > 0.99


def test_a_token_takes_what_its_layers_heads_take(tiny):
    runner = load_runner(EngineConfig(model=str(tiny[0]), dtype="float32"))
    # Two layers of 3 KV heads of 8 and two of one of 16, keys and values, float32.
    assert runner.info.memory.bytes_per_token == 2 * 2 * (3 * 8 + 16) * 4


def test_layers_that_share_keys_take_nothing(tmp_path):
    """Three of six layers have keys (sliding, full, sliding); others use the last such."""
    tiny_models.save("gemma4_shared", tmp_path)
    runner = load_runner(EngineConfig(model=str(tmp_path), dtype="float32"))
    assert runner.info.memory.bytes_per_token == 2 * (2 * 3 * 8 + 3 * 16) * 4
    spec = read_config(str(tmp_path)).spec
    assert [layer.kv_sharing_layer for layer in spec.layers] == [None, None, None, 1, 2, 1]


def test_keys_that_a_checkpoint_has_for_them_are_passed_over(tmp_path):
    """Published checkpoints contain them."""
    model = tiny_models.build("gemma4_shared")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in ("k_proj", "v_proj", "k_norm"):
        source = f"model.layers.1.self_attn.{name}.weight"
        tensors[source.replace(".1.", ".5.")] = tensors[source].clone()
    save_file(tensors, path)
    with torch.no_grad():
        expected = model(torch.tensor([prompt()])).logits[0]
    torch.testing.assert_close(paged_logits(tmp_path), expected, atol=1e-4, rtol=0)


def test_published_keys_tell_the_same_as_saved_ones(tiny, tmp_path):
    saved = read_config(str(tiny[0])).spec
    published = changed(
        tiny[0], per_layer_config=None, global_head_dim=16, num_global_key_value_heads=1
    )
    assert spec_of(tmp_path, published) == saved


def test_saved_keys_of_many_layers_are_read(tmp_path):
    """Transformers numbers them "01", "03" and so on if there are more than ten."""
    kinds = ["sliding_attention", "full_attention"] * 6
    directory = tiny_models.save("gemma4", tmp_path, num_hidden_layers=12, layer_types=kinds)
    saved = read_config(str(directory)).spec
    published = changed(
        directory, per_layer_config=None, global_head_dim=16, num_global_key_value_heads=1
    )
    assert spec_of(tmp_path, published) == saved


def test_what_a_config_leaves_out_is_the_familys(tiny, tmp_path):
    bare = changed(tiny[0], rope_parameters=None, per_layer_config=None)
    told = spec_of(tmp_path, bare)
    spec = spec_of(
        tmp_path, changed(tiny[0], rope_parameters=None, per_layer_config=None, layer_types=None)
    )
    assert (spec.rope, spec.local_rope) == (told.rope, told.local_rope)
    assert [layer.window for layer in spec.layers] == [12, 12, 12, None]


def test_the_unified_kind_has_neither_experts_nor_embeddings_of_layers(tmp_path):
    """A config may state this."""
    tiny_models.save("gemma4_unified", tmp_path)
    saved = read_config(str(tmp_path)).spec
    absent = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
    said = changed(tmp_path, **absent, vocab_size_per_layer_input=160)
    assert spec_of(tmp_path, said) == saved
    with pytest.raises(ModelLoadError, match="'enable_moe_block' is set"):
        spec_of(tmp_path, said | {"enable_moe_block": True})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 159},
            "'vocab_size_per_layer_input' is below 'vocab_size'",
        ),
        ({"num_kv_shared_layers": 3}, "'num_kv_shared_layers' leaves no layer"),
        ({"num_kv_shared_layers": 4}, "'num_kv_shared_layers' leaves no layer"),
        ({"enable_moe_block": True}, "'num_experts'"),
        (
            {"enable_moe_block": True, "num_experts": 2}
            | {"top_k_experts": 3, "moe_intermediate_size": 8},
            "'top_k_experts' exceeds",
        ),
        ({"use_bidirectional_attention": "all"}, "'use_bidirectional_attention' is 'all'"),
        ({"per_layer_config": {"1": {"head_dim": 16}}}, "'per_layer_config' has unlike heads"),
        ({"per_layer_config": {"9": {"head_dim": 16}}}, "'per_layer_config'"),
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, "'sliding_window'"),
        ({"num_key_value_heads": 4}, "'num_attention_heads'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tiny, tmp_path, changes, why):
    with pytest.raises(ModelLoadError, match=why):
        spec_of(tmp_path, changed(tiny[0], **changes))

"""Gemma 3n: published configs, whole checkpoints, and what several residual streams rule out."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig, SpeculationConfig
from engine.errors import ModelLoadError
from engine.models.altup_spec import AltUpSpec
from engine.models.families import read_spec
from engine.models.rope_spec import RopeSpec
from engine.models.spec import DecoderSpec
from engine.runner import load as load_module
from engine.runner import load_runner
from tests import tiny_models
from tests.engine.models.test_parity import paged_logits, prompt

# Of E2B, without keys that all configs have; the text section of a whole model.
E2B = {
    **{"model_type": "gemma3n_text", "vocab_size": 262400, "hidden_size": 2048, "head_dim": 256},
    **{"activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "altup_active_idx": 0},
    **{"altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_lr_multiplier": 1.0},
    **{"altup_num_inputs": 4, "final_logit_softcapping": 30.0, "laurel_rank": 64},
    **{"hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 256},
    **{"intermediate_size": [8192] * 30, "max_position_embeddings": 32768},
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
    **{"num_attention_heads": 8, "num_hidden_layers": 30, "num_key_value_heads": 2},
    **{"num_kv_shared_layers": 10, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0},
    **{"rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512},
    **{"query_pre_attn_scalar": 256, "vocab_size_per_layer_input": 262144},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(directory, Hugging Face's logits for the test's prompt)."""
    model = tiny_models.build("gemma3n")
    directory = tmp_path_factory.mktemp("gemma3n")
    model.save_pretrained(directory)
    with torch.no_grad():
        return directory, model(torch.tensor([prompt()])).logits[0]


def test_a_published_config_is_read():
    spec = read_spec(E2B)
    assert isinstance(spec, DecoderSpec)
    assert spec.altup == AltUpSpec(4, 0, 64, scales_corrected=True)
    assert (spec.rope, spec.local_rope) == (RopeSpec(1_000_000.0), RopeSpec(10_000.0))
    assert [layer.kv_sharing_layer for layer in spec.layers[18:22]] == [None, None, 18, 18]
    assert spec.layers[24].kv_sharing_layer == 19
    assert [layer.activation_sparsity for layer in spec.layers[8:12]] == [0.95, 0.95, 0.0, 0.0]
    assert [layer.window for layer in spec.layers[3:5]] == [512, None]
    left_out = ("activation_sparsity_pattern", "layer_types")
    assert read_spec({key: value for key, value in E2B.items() if key not in left_out}) == spec


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"altup_active_idx": 4}, "'altup_num_inputs'"),
        ({"altup_num_inputs": 1}, "'altup_num_inputs'"),
        ({"activation_sparsity_pattern": [1.0] * 30}, "'activation_sparsity_pattern'"),
        ({"intermediate_size": [8192] * 29}, "'intermediate_size'"),
        ({"num_kv_shared_layers": 28}, "'num_kv_shared_layers'"),
        ({"use_bidirectional_attention": True}, "'use_bidirectional_attention'"),
    ],
)
def test_other_values_are_refused_by_name(changes, reason):
    with pytest.raises(ModelLoadError, match=reason):
        read_spec({**E2B, **changes})


def test_a_whole_model_is_served_without_its_encoders(tiny, tmp_path):
    directory, expected = tiny
    tensors = load_file(directory / "model.safetensors")
    whole = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    }
    for name in ("vision_tower.a", "audio_tower.a", "embed_vision.a", "embed_audio.a"):
        whole[f"model.{name}.weight"] = torch.zeros(2)
    save_file(whole, tmp_path / "model.safetensors")
    text = json.loads((directory / "config.json").read_text())
    config = {"model_type": "gemma3n", "text_config": text, "vision_config": {"a": 1}}
    config |= {"audio_config": {"a": 1}, "audio_soft_tokens_per_image": 188, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(paged_logits(tmp_path), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunks", [(50,), (1,) * 50, (12, 12, 12, 14)])
def test_a_prompt_may_come_in_any_chunks(tiny, chunks):
    directory, expected = tiny
    logits = paged_logits(directory, chunks=chunks, attention_backend="reference")
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("changes", [{"quantization": "int8"}, {"dtype": "bfloat16"}])
def test_rounded_weights_and_values_give_nearly_the_same(tiny, changes):
    directory, expected = tiny
    logits = paged_logits(directory, **changes).float()
    assert torch.cosine_similarity(logits, expected, dim=-1).mean() > 0.97


MUTANTS = {
    "gates kept": {"layers": {"activation_sparsity": 0.0}},
    "more gates kept": {"layers": {"activation_sparsity": 0.5}},
    "another active stream": {"altup": {"active": 1}},
    "corrected stream not scaled": {"altup": {"scales_corrected": False}},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_parity_catches_a_wrong_spec(tiny, monkeypatch, name):
    directory, expected = tiny
    read, changes = load_module.read_config, MUTANTS[name]

    def mutated(model):
        config = read(model)
        spec = config.spec
        if "layers" in changes:
            layers = (dataclasses.replace(each, **changes["layers"]) for each in spec.layers)
            spec = dataclasses.replace(spec, layers=tuple(layers))
        elif "altup" in changes:
            streams = dataclasses.replace(spec.altup, **changes["altup"])
            spec = dataclasses.replace(spec, altup=streams)
        return dataclasses.replace(config, spec=spec)

    monkeypatch.setattr(load_module, "read_config", mutated)
    assert (paged_logits(directory) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"batch_invariant": True}, "batch_invariant"),
        ({"speculation": SpeculationConfig(method="mtp")}, "speculation 'mtp' reads hidden"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2: the gates"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2: .* residual stream"),
    ],
)
def test_what_several_streams_rule_out_is_refused(tiny, changes, reason):
    with pytest.raises(ModelLoadError, match=reason):
        load_runner(EngineConfig(model=str(tiny[0]), dtype="float32", **changes))

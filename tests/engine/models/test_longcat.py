"""LongCat-Flash's configs as published, and what its checkpoints have beside the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
from engine.models.families import read_spec
from engine.models.spec import DecoderSpec
from tests import tiny_models
from tests.engine.models.test_parity import paged_logits

PUBLISHED: dict[str, Any] = {
    **{"model_type": "longcat_flash", "vocab_size": 100, "hidden_size": 32, "num_layers": 3},
    **{"num_attention_heads": 4, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 16},
    **{"n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 2, "kv_lora_rank": 8},
    **{"q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"rms_norm_eps": 1e-5, "rope_theta": 10000000.0, "routed_scaling_factor": 6.0},
    **{"attention_method": "MLA", "zero_expert_type": "identity"},
}


def spec_of(**changes: Any) -> DecoderSpec:
    spec = read_spec({**PUBLISHED, **changes})
    assert isinstance(spec, DecoderSpec)
    return spec


def test_a_published_layer_is_two():
    spec = spec_of()
    assert spec.num_layers == 6
    assert [layer.experts_aside for layer in spec.layers] == [True, False] * 3
    assert spec.num_paged_layers == 6
    assert spec.rope is not None
    assert spec.rope.theta == 1e7


@pytest.mark.parametrize(
    "keys",
    [
        {"num_hidden_layers": 3},  # as some exporters count
        {"num_hidden_layers": 6},
        {"num_hidden_layers": 6, "num_layers": None},
        {"rope_theta": None},  # the class's
    ],
)
def test_other_ways_to_say_the_same(keys):
    assert spec_of(**keys) == spec_of()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_hidden_layers": 4}, "'num_hidden_layers' does not go with 3 layers"),
        ({"num_hidden_layers": 5, "num_layers": None}, "'num_hidden_layers' is odd"),
        ({"zero_expert_type": "copy"}, "'zero_expert_type' is 'copy'"),
        ({"attention_method": "GQA"}, "'attention_method' is 'GQA'"),
        ({"mla_scale_kv_lora": False}, "'mla_scale_kv_lora' is False"),
        ({"norm_topk_prob": True}, "'norm_topk_prob' is True"),
        ({"router_bias": True}, "'router_bias' is True"),
        ({"moe_topk": 9}, "'num_experts_per_tok' exceeds the 8 experts"),
    ],
)
def test_what_differs_is_refused(keys, message):
    with pytest.raises(ModelLoadError, match=message):
        spec_of(**keys)


def test_draft_layers_are_passed_over(tmp_path):
    directory = tiny_models.save("longcat_flash", tmp_path)
    expected = paged_logits(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.mtp.layers.0.eh_proj.weight"] = torch.ones(4)
    save_file(tensors, path, {"format": "pt"})
    torch.testing.assert_close(paged_logits(directory), expected, atol=0, rtol=0)


def test_weights_of_experts_that_return_what_they_read_are_passed_over(tmp_path):
    """Transformers saves half of them; an expert beyond these is an error."""
    directory = tiny_models.save("longcat_flash", tmp_path)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.experts.{}.up_proj.weight"
    assert name.format(9) in tensors
    tensors[name.format(10)] = tensors[name.format(9)].clone()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"experts\.10\.up_proj"):
        paged_logits(directory)

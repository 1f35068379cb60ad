"""Step 3.5 and 3.7 as they were published, and files with a layer's experts in one tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
from engine.models.draft_head.config import mtp_spec
from engine.models.expert_rows import split_experts
from engine.models.families import read_spec
from engine.models.safetensors import Header, TensorEntry
from tests import tiny_models
from tests.engine.models.test_parity import paged_logits, prompt

# Keys that transformers writes, and what the published configs have instead.
_SAVED = {
    *("rope_parameters", "n_routed_experts", "num_experts_per_tok", "mlp_bias", "model_type"),
    *("num_key_value_heads", "mlp_layer_types", "num_sliding_attention_heads"),
    *("per_layer_config", "query_pre_attn_scalar"),
}
_PUBLISHED: dict[str, Any] = {
    **{"moe_num_experts": 6, "moe_top_k": 3, "num_attention_groups": 2, "moe_layers_enum": "1,2,4"},
    **{"rope_theta": [1000.0, 10000.0, 1000.0, 1e6], "num_nextn_predict_layers": 1},
    **{"partial_rotary_factors": [1.0, 0.5, 1.0, 0.5], "yarn_only_types": ["full_attention"]},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "swiglu_limits": [0.0, 0.5, 0.0, 0.0],
    "swiglu_limits_shared": [0.7, 0.0, 0.4, 0.0],
    "attention_other_setting": {
        **{"attention_type": "sliding_attention", "num_attention_heads": 4, "head_dim": 16},
        **{"num_attention_groups": 2, "true_head_dim": 16},
    },
    **{"att_impl_type": "GQA", "use_moe": True, "moe_every_n_layer": 1, "norm_expert_weight": True},
    **{"use_moe_router_bias": True, "moe_router_activation": "sigmoid", "zero_centered": True},
    **{"use_head_wise_attn_gate": True, "use_qk_norm": True, "max_seq_len": 128},
}


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """(a saved model's directory, Hugging Face's logits for the prompt)."""
    directory = tmp_path_factory.mktemp("step")
    model = tiny_models.build("step3p7")
    with torch.no_grad():
        logits = model(torch.tensor([prompt()])).logits[0]
    model.save_pretrained(directory)
    return directory, logits


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def published(saved: dict[str, Any], **changes: Any) -> dict[str, Any]:
    text = {key: value for key, value in saved["text_config"].items() if key not in _SAVED}
    return {**saved, "text_config": {**text, **_PUBLISHED, **changes}}


def test_the_text_model_by_itself(step, tmp_path):
    """As Step 3.5 was published."""
    directory, expected = step
    tensors = load_file(directory / "model.safetensors")
    text = {name: part for name, part in tensors.items() if not name.startswith(("vi", "visi"))}
    save_file(text, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config_of(directory)["text_config"]))
    torch.testing.assert_close(paged_logits(tmp_path), expected, atol=1e-4, rtol=0)


def test_published_keys_mean_the_same(step):
    saved = config_of(step[0])
    spec, twin = read_spec(published(saved)), read_spec(saved)
    assert spec.num_unread_layers == 1
    assert spec.layers == twin.layers
    assert (spec.rope, spec.local_rope) == (twin.rope, twin.local_rope)
    assert (spec.moe, spec.score_scale) == (twin.moe, twin.score_scale)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"moe_layers_enum": "1,x"}, "'moe_layers_enum' must be numbers"),
        ({"rope_theta": [1000.0, 1e4, 2000.0, 1e6]}, "differs among layers of sliding_attention"),
        ({"attention_other_setting": {"num_attention_heads": 5}}, "does not go with 2 KV heads"),
        ({"attention_other_setting": {"head_dim": 8}}, "'head_dim' is 8"),
        ({"per_layer_config": {"1": {"num_attention_heads": 4}}}, "of layer 1 is not supported"),
        ({"swiglu_limits": ["much", 0.5, None]}, "'much', which is not a limit"),
        ({"use_rope_layers": [1]}, "'use_rope_layers' is set"),
        ({"zero_centered": False}, "'zero_centered' is False"),
    ],
)
def test_what_is_not_supported_is_named(step, changes, named):
    with pytest.raises(ModelLoadError, match=named):
        read_spec(published(config_of(step[0]), **changes))


def test_its_draft_layers_cannot_serve(step):
    spec = read_spec(published(config_of(step[0])))
    with pytest.raises(ModelLoadError, match="mtp is not supported for step3p7"):
        mtp_spec(spec, (), step[0])


def test_experts_in_one_tensor_have_an_entry_each():
    def entry(name: str, *shape: int) -> TensorEntry:
        return TensorEntry(name, torch.float32, shape, 100, 4 * torch.Size(shape).numel())

    stacked = entry("a.up.weight", 3, 4, 5), entry("a.w1", 6, 5), entry("a.bent.weight", 4, 5)
    header = Header(Path("x"), {e.name: e for e in (*stacked, entry("a.norm", 3))}, b"", 1000)
    names = {"a.up.0.weight", "a.0.w1", "a.bent.0.weight", "a.norm"}
    (split,) = split_experts([header], names, 3)
    assert [*split.entries] == [
        *(f"a.up.{e}.weight" for e in range(3)),
        *(f"a.{e}.w1" for e in range(3)),
        *("a.bent.weight", "a.norm"),  # not in three parts, and not of experts
    ]
    third = split.entries["a.up.2.weight"]
    assert (third.shape, third.begin, third.num_bytes) == ((4, 5), 100 + 2 * 80, 80)
    assert split.entries["a.1.w1"].shape == (2, 5)

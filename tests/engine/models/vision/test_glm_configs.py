"""GLM-4.1V's settings as they were published: the text model's keys at the top level."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.images.types import AreaScaling
from engine.models.checkpoint import ModelConfig, read_config
from engine.models.rope_spec import MropeSpec
from engine.models.spec import DecoderSpec
from engine.models.vision.spec import GatedMergerSpec

_CONFIG: dict[str, Any] = {
    **{"model_type": "glm4v", "attention_bias": True, "hidden_act": "silu", "hidden_size": 4096},
    **{"image_start_token_id": 151_339, "image_end_token_id": 151_340, "image_token_id": 151_343},
    **{"video_start_token_id": 151_341, "video_end_token_id": 151_342, "video_token_id": 151_344},
    **{"intermediate_size": 13_696, "max_position_embeddings": 65_536, "num_hidden_layers": 40},
    **{"num_attention_heads": 32, "num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    **{"rms_norm_eps": 1e-5, "rope_theta": 10_000, "vocab_size": 151_552},
    "eos_token_id": [151_329, 151_336, 151_338, 151_348],
    "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]},
    "vision_config": {
        **{"hidden_size": 1536, "depth": 24, "num_heads": 12, "attention_bias": False},
        **{"intermediate_size": 13_696, "hidden_act": "silu", "image_size": 336, "patch_size": 14},
        **{"out_hidden_size": 4096, "rms_norm_eps": 1e-5, "spatial_merge_size": 2},
        **{"temporal_patch_size": 2, "in_channels": 3, "initializer_range": 0.02},
    },
}


def read(directory: Path, **vision: Any) -> ModelConfig:
    config = {**_CONFIG, "vision_config": {**_CONFIG["vision_config"], **vision}}
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(str(directory))


def test_the_published_config(tmp_path):
    processor = {"size": {"shortest_edge": 12_544, "longest_edge": 47_040_000}, "patch_size": 14}
    processor |= {"temporal_patch_size": 2, "merge_size": 2, "processor_class": "Glm4vProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    config = read(tmp_path)
    assert isinstance(config.spec, DecoderSpec)
    assert config.spec.rope is not None
    assert config.spec.rope.num_dims == 64
    assert config.spec.rope.mrope == MropeSpec((8, 12, 12))
    assert config.spec.qkv_bias
    assert config.vision is not None, config.vision_unsupported_reason
    scaling = AreaScaling(12_544, 47_040_000, num_frames=2, growing="cut")
    assert config.vision.rules.scaling == scaling
    spec = config.vision.spec
    assert (spec.intermediate_size, spec.merger) == (4096, GatedMergerSpec(13_696))
    assert (spec.position_grid_size, spec.cell_size) == (24, 28)


@pytest.mark.parametrize(
    ("vision", "reason"),
    [
        ({"attention_bias": True}, "'attention_bias' is True; only False is supported"),
        ({"image_size": 13}, "'image_size' of 13 is less than a patch of 14"),
        ({"hidden_act": "relu"}, "'hidden_act' is 'relu'; known: gelu,"),
        ({"window_size": 4}, "unsupported keys: 'window_size'"),
    ],
)
def test_images_that_are_not_served_leave_the_text(tmp_path, vision, reason):
    config = read(tmp_path, **vision)
    assert config.vision is None
    assert reason in str(config.vision_unsupported_reason)
    assert config.spec.num_layers == 40


# Of GLM-4.5V. Its text section repeats the tokens that stand for images.
_GLM_45V: dict[str, Any] = {
    **{"model_type": "glm4v_moe", "dtype": "bfloat16", "tie_word_embeddings": False},
    **{"image_start_token_id": 151_339, "image_end_token_id": 151_340, "image_token_id": 151_363},
    **{"video_start_token_id": 151_341, "video_end_token_id": 151_342, "video_token_id": 151_364},
    "text_config": {
        **{"attention_bias": True, "attention_dropout": 0.0, "dtype": "bfloat16", "head_dim": 128},
        **{"eos_token_id": [151_329, 151_336, 151_338], "first_k_dense_replace": 1, "n_group": 1},
        **{"hidden_act": "silu", "hidden_size": 4096, "image_end_token_id": 151_340},
        **{"image_start_token_id": 151_339, "image_token_id": 151_363, "n_routed_experts": 128},
        **{"intermediate_size": 10_944, "max_position_embeddings": 65_536, "n_shared_experts": 1},
        **{"model_type": "glm4v_moe_text", "moe_intermediate_size": 1408, "norm_topk_prob": True},
        **{"num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46},
        **{"num_key_value_heads": 8, "pad_token_id": 151_329, "partial_rotary_factor": 0.5},
        **{"rms_norm_eps": 1e-5, "rope_theta": 10_000, "routed_scaling_factor": 1.0},
        **{"rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"}},
        **{"topk_group": 1, "use_cache": True, "use_qk_norm": False, "vocab_size": 151_552},
    },
    "vision_config": {
        **{**_CONFIG["vision_config"], "attention_dropout": 0.0, "intermediate_size": 10_944},
        "model_type": "glm4v_moe",
    },
}


def test_a_text_section_may_repeat_the_tokens_of_images(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(_GLM_45V))
    config = read_config(str(tmp_path))
    assert isinstance(config.spec, DecoderSpec)
    assert (config.spec.num_layers, config.spec.eos_token_ids[0]) == (46, 151_329)
    assert config.vision is not None, config.vision_unsupported_reason

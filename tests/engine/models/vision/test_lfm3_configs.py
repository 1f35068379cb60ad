"""Settings of LFM3-VL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.images.types import AreaScaling
from engine.models.checkpoint import ModelConfig, read_config
from engine.models.spec import DecoderSpec

_CONFIG: dict[str, Any] = {
    **{"model_type": "lfm3_vl", "image_token_id": 900, "video_token_id": 901},
    **{"vision_start_token_id": 902, "vision_end_token_id": 903, "projector_bias": True},
    **{"projector_hidden_act": "gelu", "projector_hidden_size": 4096},
    "text_config": {
        **{"model_type": "lfm3", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000},
        **{"num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 96},
        **{"head_dim": 16, "layer_types": ["conv", "full_attention"], "norm_eps": 1e-5},
    },
    "vision_config": {
        **{"model_type": "lfm3_vl_vision", "conv_kernel_size": 3, "hidden_size": 1024},
        **{"in_channels": 3, "intermediate_size": 2560, "num_attention_heads": 16},
        **{"num_hidden_layers": 14, "num_key_value_heads": 8, "patch_size": 16},
        **{"spatial_merge_size": 2, "temporal_patch_size": 2, "norm_eps": 1e-5},
        "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "axial"},
    },
}


def read(directory: Path, **vision: Any) -> ModelConfig:
    config = {**_CONFIG, "vision_config": {**_CONFIG["vision_config"], **vision}}
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(str(directory))


def test_layers_are_convolutions_unless_the_config_says_so(tmp_path):
    config = read(tmp_path)
    assert isinstance(config.spec, DecoderSpec)
    assert config.spec.tie_word_embeddings
    vision = config.vision
    assert vision is not None, config.vision_unsupported_reason
    assert vision.spec.conv_layers == frozenset((0, 1, 3, 5, 7, 9, 11, 13))
    assert (vision.rules.cell, vision.rules.scaling) == (32, AreaScaling(3136, 1_003_520))
    assert vision.video is not None
    kinds = ["full_attention"] * 13 + ["conv"]
    told = read(tmp_path, layer_types=kinds).vision
    assert told is not None
    assert told.spec.conv_layers == frozenset((13,))


@pytest.mark.parametrize(
    ("vision", "reason"),
    [
        ({"conv_kernel_size": 2}, "'conv_kernel_size' of 2 has no middle"),
        ({"layer_types": ["mamba"] * 14}, "has 'mamba', which is not supported"),
        ({"num_key_value_heads": 5}, "must divide the 16 attention heads"),
    ],
)
def test_images_that_are_not_served_leave_the_text(tmp_path, vision, reason):
    config = read(tmp_path, **vision)
    assert config.vision is None
    assert reason in str(config.vision_unsupported_reason)

"""Settings of PaddleOCR-VL, LightOnOCR and Cohere's models as they were published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.images.read import process_image, scaled_size
from engine.images.tiles import fitting_grid
from engine.images.types import AreaScaling, EdgeScaling, GridScaling, ImageRules
from engine.models.checkpoint import ModelConfig, read_config
from engine.models.rope_spec import MropeSpec
from engine.models.spec import DecoderSpec
from tests.tiny_processors import CohereProcessor

SIDES = st.integers(1, 2000)
_SIGLIP = {
    **{"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27},
    **{"intermediate_size": 4304, "attention_dropout": 0.0, "layer_norm_eps": 1e-6},
    **{"num_channels": 3, "patch_size": 14, "hidden_act": "gelu_pytorch_tanh"},
}
_TEXT = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 256_000},
    **{"num_hidden_layers": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192},
}
_COHERE2 = {**_TEXT, "model_type": "cohere2", "logit_scale": 0.25, "sliding_window": 4096}
PUBLISHED: dict[str, dict[str, Any]] = {
    "aya_vision": {
        **{"adapter_layer_norm_eps": 1e-6, "downsample_factor": 2, "image_token_index": 255_036},
        **{"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        "text_config": _COHERE2,
        "vision_config": {**_SIGLIP, "model_type": "siglip_vision_model", "image_size": 364},
    },
    "cohere2_vision": {
        **{"alignment_intermediate_size": 36_864, "downsample_factor": 2},
        **{"image_token_id": 255_036, "tie_word_embeddings": True},
        "text_config": _COHERE2,
        "vision_config": {
            **{**_SIGLIP, "patch_size": 16, "image_size": 512, "vision_use_head": False},
            "model_type": "siglip_vision_model",
        },
    },
    "lighton_ocr": {
        **{"image_token_id": 151_655, "spatial_merge_size": 2},
        "text_config": {**_TEXT, "model_type": "qwen3", "head_dim": 16, "rope_theta": 1_000_000},
        "vision_config": {
            **{"attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "image_size": 1540},
            **{"hidden_size": 1024, "intermediate_size": 4096, "model_type": "pixtral"},
            **{"num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24},
            **{"patch_size": 14, "rope_theta": 10_000},
        },
    },
    "paddleocr_vl": {
        "auto_map": {"AutoConfig": "configuration_paddleocr_vl.PaddleOCRVLConfig"},
        **{**_TEXT, "compression_ratio": 1.0, "head_dim": 128, "hidden_act": "silu"},
        **{"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "ignored_index": -100},
        **{"image_token_id": 100_295, "max_sequence_length": None, "rms_norm_eps": 1e-5},
        "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
        **{"rope_theta": 500_000, "rope_is_neox_style": True, "sliding_window": None},
        **{"tie_word_embeddings": False, "use_3d_rope": True, "use_bias": False},
        **{"use_flash_attention": False, "video_token_id": 101_307, "weight_share_add_bias": True},
        **{"vision_start_token_id": 101_305, "torch_dtype": "bfloat16"},
        "vision_config": {
            "auto_map": {"AutoModel": "modeling_paddleocr_vl.SiglipVisionModel"},
            **{**_SIGLIP, "image_size": 384, "model_type": "paddleocr_vl", "pad_token_id": 0},
            **{"spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2},
            "torch_dtype": "bfloat16",
        },
    },
}


def read(directory: Path, kind: str, *, vision: Any = None, **whole: Any) -> ModelConfig:
    config = {"model_type": kind, **PUBLISHED[kind], **whole}
    config["vision_config"] = {**config["vision_config"], **(vision or {})}
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(str(directory))


@pytest.mark.parametrize(
    ("kind", "cell", "scaling"),
    [
        ("aya_vision", 28, GridScaling(364, 1, 12)),
        ("cohere2_vision", 32, GridScaling(512, 1, 12, fits=True)),
        ("lighton_ocr", 28, EdgeScaling(1540)),
        ("paddleocr_vl", 28, AreaScaling(147_456, 2_359_296, growing="rounded")),
    ],
)
def test_published_configs(tmp_path, kind, cell, scaling):
    config = read(tmp_path, kind)
    assert isinstance(config.spec, DecoderSpec)
    assert config.vision is not None, config.vision_unsupported_reason
    assert (config.vision.rules.cell, config.vision.rules.scaling) == (cell, scaling)
    assert config.spec.tie_word_embeddings == (kind != "paddleocr_vl")
    if kind in ("aya_vision", "cohere2_vision"):
        assert config.spec.logit_scale == 0.25
    if kind == "paddleocr_vl":
        assert config.spec.rope is not None
        assert config.spec.rope.mrope == MropeSpec((16, 24, 24))
        assert not config.spec.rope.interleaved


@pytest.mark.parametrize(
    ("kind", "vision", "whole", "reason"),
    [
        ("aya_vision", {}, {"downsample_factor": 3}, "cells of 3 patches a side; an image has 26"),
        ("aya_vision", {"model_type": "vit"}, {}, "'model_type' is 'vit'; only 'siglip_vision"),
        ("cohere2_vision", {"image_size": 384}, {}, "'patch_size' is 16; a tile has 12 cells"),
        ("cohere2_vision", {}, {"alignment_intermediate_size": 7}, "of 7 has no halves"),
        ("paddleocr_vl", {"image_size": 9}, {}, "'image_size' of 9 is less than a patch of 14"),
        ("lighton_ocr", {"head_dim": 32}, {}, "'head_dim' is 32; only 64 is supported"),
    ],
)
def test_images_that_are_not_served_leave_the_text(tmp_path, kind, vision, whole, reason):
    config = read(tmp_path, kind, vision=vision, **whole)
    assert config.vision is None
    assert reason in str(config.vision_unsupported_reason)
    assert config.spec.num_layers == 4


@settings(deadline=None)
@given(SIDES, SIDES)
def test_sizes_are_those_of_paddles_smart_resize(height, width):
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import smart_resize

    scaling = AreaScaling(147_384, 2_822_400, growing="rounded")
    rules = ImageRules(token_id=1, cell=28, scaling=scaling, max_images=1)
    try:
        wanted = smart_resize(height, width, min_pixels=147_384, max_pixels=2_822_400)
    except ValueError:
        return
    assert scaled_size(height, width, rules) == wanted


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 12))
@example(64, 32, 12)  # exactly a grid
@example(96, 64, 12)
def test_grids_are_command_a_visions(height, width, most):
    """Hugging Face's processor needs torchvision; ``tests/tiny_processors.py`` has its steps."""
    reference = CohereProcessor(32, 4, most)
    pixels = np.broadcast_to(np.uint8(7), (height, width, 3))
    tiles = reference.tiles(pixels)
    rows, columns = fitting_grid(height, width, GridScaling(32, 1, most, fits=True))
    assert len(tiles) == (rows * columns + 1 if rows * columns > 1 else 1)


@pytest.mark.parametrize("shape", [(30, 31), (100, 50), (90, 140)])
def test_tiles_of_command_a_vision(shape):
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    rules = ImageRules(token_id=1, cell=8, scaling=GridScaling(32, 1, 12, fits=True), max_images=1)
    found = process_image(Image.fromarray(pixels), rules)
    wanted = CohereProcessor(32, 4).tiles(pixels)
    assert [part.pixels for part in found.parts] == [tile.tobytes() for tile in wanted]

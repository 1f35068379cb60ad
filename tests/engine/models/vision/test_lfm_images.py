"""Images of LFM2-VL: settings as they were published, and tiles as its processor cuts them.

Hugging Face's processor needs torchvision; ``tests/tiny_processors.py`` has its steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.errors import InvalidParameter
from engine.images.read import process_image
from engine.images.types import ImageRules, SplitScaling
from engine.models.checkpoint import ModelConfig, read_config
from engine.runner.image_load import _max_image_cells, _within
from tests.tiny_processors import Lfm2Processor

_CONFIG: dict[str, Any] = {
    **{"model_type": "lfm2_vl", "do_image_splitting": True, "downsample_factor": 2},
    **{"encoder_patch_size": 16, "image_token_id": 396, "max_image_tokens": 256, "max_tiles": 10},
    **{"max_num_patches": 1024, "max_pixels_tolerance": 2.0, "min_image_tokens": 64},
    **{"min_tiles": 2, "projector_bias": True, "projector_hidden_act": "gelu", "tile_size": 512},
    **{"projector_hidden_size": 2560, "use_image_special_tokens": True, "use_thumbnail": True},
    "vision_feature_layer": -1,
    "text_config": {
        **{"model_type": "lfm2", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000},
        **{"num_hidden_layers": 2, "num_key_value_heads": 2, "conv_L_cache": 3},
        **{"full_attn_idxs": [1], "max_position_embeddings": 128_000, "norm_eps": 1e-5},
        "block_ff_dim": 96,
    },
    "vision_config": {
        **{"attention_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152},
        **{"intermediate_size": 4304, "layer_norm_eps": 1e-6, "num_attention_heads": 16},
        **{"model_type": "siglip2_vision_model", "num_channels": 3, "num_hidden_layers": 26},
        **{"num_patches": 256, "patch_size": 16, "vision_use_head": False},
    },
}
_SMALL = SplitScaling(16, 2, 10, 2 * 64, 6 * 64)


def read(directory: Path, *, vision: Any = None, **whole: Any) -> ModelConfig:
    config = {**_CONFIG, **whole}
    config["vision_config"] = {**_CONFIG["vision_config"], **(vision or {})}
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(str(directory))


def rules(scaling: SplitScaling) -> ImageRules:
    return ImageRules(token_id=1, cell=8, scaling=scaling, resampling="bilinear", max_images=1)


def test_the_published_config(tmp_path):
    for _ in range(2):
        vision = read(tmp_path).vision
        assert vision is not None
        assert vision.rules.scaling == SplitScaling(512, 2, 10, 65_536, 262_144)
        assert (vision.rules.cell, vision.rules.resampling) == (32, "bilinear")
        assert vision.spec.position_grid_size == 16
        Lfm2Processor().save_pretrained(tmp_path)  # published values are the defaults


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        ({"use_thumbnail": False}, "'use_thumbnail' is False; only True is supported"),
        ({"encoder_patch_size": 14}, "'encoder_patch_size' is 14; only 16 is supported"),
        ({"tile_size": 500}, "'tile_size' of 500 has no whole cells of 32 pixels"),
        ({"min_image_tokens": 300}, "'max_image_tokens' of 256 is less than the minimum of 300"),
        ({"min_tiles": 11}, "'max_tiles' of 10 is less than the 11 of min_tiles"),
    ],
)
def test_settings_that_are_not_served(tmp_path, processor, reason):
    Lfm2Processor().save_pretrained(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **processor}))
    assert reason in str(read(tmp_path).vision_unsupported_reason)


def test_without_splitting(tmp_path):
    Lfm2Processor().save_pretrained(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_image_splitting": False}))
    vision = read(tmp_path).vision
    assert vision is not None
    assert vision.rules.scaling == SplitScaling(512, 1, 1, 65_536, 262_144)


def parts_of(height: int, width: int, scaling: SplitScaling) -> list[tuple[int, int, bytes]]:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    found = process_image(Image.fromarray(pixels), rules(scaling))
    return [(part.height, part.width, part.pixels) for part in found.parts]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 120), st.integers(1, 120))
def test_tiles_and_whole_images(height, width):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    wanted, _, _ = Lfm2Processor(4, 16, 2, 6).tiles(pixels)
    if wanted[-1].shape[0] * wanted[-1].shape[1] > 6 * 64:
        with pytest.raises(InvalidParameter, match="too narrow"):
            parts_of(height, width, _SMALL)
    else:
        shown = [(*tile.shape[:2], tile.tobytes()) for tile in wanted]
        assert parts_of(height, width, _SMALL) == shown


@settings(deadline=None, max_examples=60)
@given(st.integers(20, 90), st.integers(20, 90), st.integers(1, 60))
def test_images_keep_to_the_limit_on_tokens(height, width, most):
    scaling = _within(rules(_SMALL), most)
    assert isinstance(scaling, SplitScaling)
    assert _max_image_cells(rules(scaling)) <= most
    try:
        parts = parts_of(height, width, scaling)
    except InvalidParameter:
        return
    assert sum(rows * columns for rows, columns, _ in parts) <= most * 64

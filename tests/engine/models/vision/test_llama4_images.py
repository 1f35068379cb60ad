"""Images of Llama 4: settings as they were published, and tiles as its processor cuts them.

Hugging Face's processor needs torchvision; ``tests/tiny_processors.py`` has its steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.images.placeholders import make_rewriter
from engine.images.read import ProcessedImage, process_image
from engine.images.types import CornerScaling, ImageRules
from engine.models.checkpoint import ModelConfig, read_config
from engine.models.spec import DecoderSpec
from engine.models.vision.spec import AdapterSpec
from engine.runner.image_load import _max_image_cells, _within
from tests.tiny_processors import Llama4Processor

_CONFIG: dict[str, Any] = {
    **{"model_type": "llama4", "boi_token_index": 200_080, "eoi_token_index": 200_081},
    **{"image_token_index": 200_092, "tie_word_embeddings": False},
    "text_config": {
        **{"model_type": "llama4_text", "hidden_size": 64, "intermediate_size": 96},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        **{"num_hidden_layers": 4, "intermediate_size_mlp": 128, "vocab_size": 202_048},
        **{"num_experts_per_tok": 1, "num_local_experts": 4, "interleave_moe_layer_step": 1},
    },
    "vision_config": {
        **{"attention_dropout": 0.0, "hidden_act": "gelu", "hidden_size": 1408},
        **{"image_size": 336, "initializer_range": 0.02, "intermediate_size": 5632},
        **{"model_type": "llama4_vision_model", "multi_modal_projector_bias": False},
        **{"norm_eps": 1e-5, "num_attention_heads": 16, "num_channels": 3, "patch_size": 14},
        **{"num_hidden_layers": 34, "pixel_shuffle_ratio": 0.5, "projector_dropout": 0.0},
        **{"projector_input_dim": 4096, "projector_output_dim": 4096, "rope_theta": 10_000},
        **{"vision_feature_layer": -1, "vision_feature_select_strategy": "default"},
        "vision_output_dim": 4096,
    },
}
_NAMES = {
    **{200_080: "<|image_start|>", 200_081: "<|image_end|>", 200_090: "<|image|>"},
    **{200_084: "<|tile_x_separator|>", 200_085: "<|tile_y_separator|>", 200_092: "<|patch|>"},
}


def read(
    directory: Path, *, vision: Any = None, processor: Any = None, names: Any = None
) -> ModelConfig:
    config = {**_CONFIG, "vision_config": {**_CONFIG["vision_config"], **(vision or {})}}
    (directory / "config.json").write_text(json.dumps(config))
    tokens = [{"id": id_, "content": name} for id_, name in (names or _NAMES).items()]
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    if processor is not None:
        path = directory / "preprocessor_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **processor}))
    return read_config(str(directory))


def rules(scaling: CornerScaling, **changes: Any) -> ImageRules:
    return ImageRules(
        token_id=1, cell=8, scaling=scaling, resampling="bilinear", max_images=1, **changes
    )


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def test_the_published_config(tmp_path):
    for _ in range(2):
        config = read(tmp_path)
        assert isinstance(config.spec, DecoderSpec)
        vision = config.vision
        assert vision is not None, config.vision_unsupported_reason
        assert (vision.rules.cell, vision.rules.scaling) == (28, CornerScaling(336, 16))
        assert vision.rules.resampling == "bilinear"
        assert (vision.spec.merger, vision.spec.num_positions) == (AdapterSpec(4096), 577)
        Llama4Processor(336).save_pretrained(tmp_path)  # published values are the defaults


def test_tiles_are_told_apart(tmp_path):
    vision = read(tmp_path).vision
    assert vision is not None
    tile = ProcessedImage(28, 28, b"", b"")
    pictures = [ProcessedImage(28, 28, b"", b"", (tile,) * 6, 3), tile]
    rewrite = make_rewriter(pictures, vision.rules)
    assert rewrite is not None
    row = "<|patch|><|tile_x_separator|>" * 2 + "<|patch|><|tile_y_separator|>"
    alone = "<|image|><|patch|><|image_end|>"
    assert rewrite("a<|image|>b<|image|>") == (
        f"a<|image_start|>{row * 2}{alone}b<|image_start|>{alone}"
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vision": {"pixel_shuffle_ratio": 0.3}}, "is 0.3, which makes no whole patches"),
        ({"vision": {"intermediate_size": 4096}}, "is not that of 2 x 2 patches"),
        ({"vision": {"vision_output_dim": 7680}}, "'vision_output_dim' is 7680; only 4096"),
        ({"vision": {"hidden_act": "silu"}}, "'hidden_act' is 'silu'; only 'gelu'"),
        ({"names": {200_092: "<|patch|>"}}, "has no token '<|image|>'"),
        ({"processor": {"size": {"height": 9, "width": 9}}}, "'size' is {'height': 9"),
    ],
)
def test_images_that_are_not_served_leave_the_text(tmp_path, changes, reason):
    Llama4Processor(336).save_pretrained(tmp_path)
    config = read(tmp_path, **changes)
    assert config.vision is None
    assert reason in str(config.vision_unsupported_reason)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 200),
    st.integers(1, 200),
    st.sampled_from([(16, False), (16, True), (5, False), (1, False)]),
)
@example(64, 32, (16, False))  # exactly a canvas
@example(1, 200, (16, False))
@example(9, 9, (16, True))
def test_tiles_and_whole_images(height, width, kind):
    pixels = picture(height, width)
    wanted, (rows, columns) = Llama4Processor(16, *kind).tiles(pixels)
    found = process_image(Image.fromarray(pixels), rules(CornerScaling(16, *kind)))
    assert [part.pixels for part in found.parts] == [tile.tobytes() for tile in wanted]
    assert found.grid == ((rows, columns) if rows * columns > 1 else (0, 0))


@pytest.mark.parametrize(("most", "tiles"), [(20, 4), (16, 3), (12, 2), (11, 1), (4, 1)])
def test_images_keep_to_the_limit_on_tokens(most, tiles):
    scaling = _within(rules(CornerScaling(16, 16)), most)
    assert scaling == CornerScaling(16, tiles)
    assert _max_image_cells(rules(scaling)) <= most

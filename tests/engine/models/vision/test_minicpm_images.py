"""Images of MiniCPM-V 4.6: its settings, and slices as its processor cuts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.errors import InvalidParameter
from engine.images.placeholders import expand_image_tokens, make_rewriter
from engine.images.read import ProcessedImage, process_image
from engine.images.slices import part_size, sliced_grid
from engine.images.types import ImageRules, SliceScaling, TileRewrite
from engine.models.checkpoint import ModelConfig, read_config
from engine.models.spec import DecoderSpec
from engine.models.vision.spec import InnerMergeSpec
from engine.runner.image_load import _max_image_cells, _within

SIDES = st.integers(1, 4000)
_CONFIG: dict[str, Any] = {
    **{"model_type": "minicpmv4_6", "image_token_id": 900, "video_token_id": 901},
    **{"insert_layer_id": 6, "image_size": 448, "drop_vision_last_layer": False},
    **{"downsample_mode": "16x", "merge_kernel_size": [2, 2], "merger_times": 1},
    "text_config": {
        **{"model_type": "qwen3_5_text", "hidden_size": 64, "num_attention_heads": 4},
        **{"num_hidden_layers": 4, "num_key_value_heads": 2, "intermediate_size": 96},
        **{"head_dim": 32, "vocab_size": 1000, "max_position_embeddings": 4096},
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
            "mrope_section": [3, 3, 2],
        },
    },
    "vision_config": {
        **{"model_type": "minicpmv4_6_vision", "hidden_size": 1152, "image_size": 980},
        **{"intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27},
        **{"patch_size": 14, "num_channels": 3, "window_kernel_size": [2, 2]},
        "insert_layer_id": 6,
    },
}
_NAMES = (
    *("<|image_pad|>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"),
)


def read(
    directory: Path, *, vision: Any = None, processor: Any = None, **whole: Any
) -> ModelConfig:
    config = {**_CONFIG, **whole}
    config["vision_config"] = {**_CONFIG["vision_config"], **(vision or {})}
    tokens = [{"id": 900 + i, "content": name} for i, name in enumerate(_NAMES)]
    for name, contents in (
        ("config.json", config),
        ("tokenizer.json", {"added_tokens": tokens}),
        ("preprocessor_config.json", processor or {}),
    ):
        (directory / name).write_text(json.dumps(contents))
    return read_config(str(directory))


def rules(scaling: SliceScaling, **changes: Any) -> ImageRules:
    return ImageRules(token_id=1, cell=16, scaling=scaling, max_images=2, **changes)


def picture(height: int, width: int) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def test_the_settings(tmp_path):
    config = read(tmp_path)
    assert isinstance(config.spec, DecoderSpec)
    assert config.spec.rope is not None
    assert config.spec.rope.mrope is None, "tokens of images are counted like others"
    vision = config.vision
    assert vision is not None, config.vision_unsupported_reason
    spec = vision.spec
    assert (vision.rules.cell, vision.rules.scaling) == (56, SliceScaling(448, 9))
    assert (spec.inner_merge, spec.cell_patches) == (InnerMergeSpec(6, 2), 4)
    assert spec.position_grid_size == 70
    whole = "<image><|image_pad|></image>"
    assert vision.rules.rewriting == TileRewrite(
        *("<|image_pad|>", "<slice><|image_pad|></slice>", whole, whole, "", "\n"),
        begin="<image_id>{index}</image_id>",
        whole_first=True,
    )
    plain = read(tmp_path, processor={"use_image_id": False, "slice_mode": False}).vision
    assert plain is not None
    assert plain.rules.scaling == SliceScaling(448, 1)
    assert isinstance(plain.rules.rewriting, TileRewrite)
    assert plain.rules.rewriting.begin == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"downsample_mode": "4x"}, "'downsample_mode' is '4x'; only '16x'"),
        ({"merger_times": 2}, "'merger_times' is 2; only 1"),
        ({"insert_layer_id": 27}, "is 27; there are 27 layers"),
        ({"vision": {"window_kernel_size": [2, 1]}}, "must be a square below 16, not 2 x 1"),
        ({"processor": {"scale_resolution": 50}}, "of 50 is less than a cell's side"),
        ({"image_token_id": None}, "'image_token_id' is missing"),
    ],
)
def test_images_that_are_not_served_leave_the_text(tmp_path, changes, reason):
    config = read(tmp_path, **changes)
    assert config.vision is None
    assert reason in str(config.vision_unsupported_reason)
    assert isinstance(config.spec, DecoderSpec)


@settings(deadline=None)
@given(SIDES, SIDES, st.sampled_from([9, 4, 1]))
@example(448, 448, 9)
@example(449, 448, 9)
def test_sizes_are_the_processors(height, width, most):
    from transformers import MiniCPMV4_6ImageProcessorPil

    theirs, scaling = MiniCPMV4_6ImageProcessorPil(), SliceScaling(448, most)
    grid = theirs.get_sliced_grid((height, width), most, 448)
    assert sliced_grid(height, width, scaling) == (None if grid is None else tuple(grid))
    wanted = theirs.find_best_resize((height, width), 448, 14, "16x", allow_upscale=grid is None)
    if wanted[0] * wanted[1] > 128 * 56**2:
        with pytest.raises(InvalidParameter, match="too narrow"):
            part_size(height, width, scaling, 56, grows=grid is None)
    else:
        assert part_size(height, width, scaling, 56, grows=grid is None) == wanted


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 200), st.integers(1, 200))
@example(48, 48)
@example(150, 40)
def test_pixels_are_the_processors(height, width):
    from transformers import MiniCPMV4_6ImageProcessorPil

    assume(max(height, width) < 20 * min(height, width))
    processor = MiniCPMV4_6ImageProcessorPil(
        scale_resolution=48, patch_size=4, do_rescale=False, do_normalize=False
    )
    wanted = processor(picture(height, width), return_tensors="np")
    found = process_image(picture(height, width), rules(SliceScaling(48, 9)))
    sizes = [[part.height // 4, part.width // 4] for part in found.parts]
    assert sizes == wanted["target_sizes"].tolist()
    packed = []
    for part in found.parts:
        pixels = np.frombuffer(part.pixels, np.uint8).reshape(part.height, part.width, 3)
        packed.append(processor.reshape_by_patch(pixels.transpose(2, 0, 1), 4))
    np.testing.assert_array_equal(np.concatenate(packed, -1)[None], wanted["pixel_values"])
    assert list(found.grid) == wanted["grids"][0]


def test_the_whole_image_comes_first_and_has_a_number(tmp_path):
    vision = read(tmp_path).vision
    assert vision is not None
    part = ProcessedImage(56, 56, b"", b"")
    cut = ProcessedImage(112, 56, b"", b"w", (part,) * 4, 2, comes_first=True)
    rewrite = make_rewriter([cut, part], vision.rules)
    assert rewrite is not None
    row = "<slice><|image_pad|></slice>" * 2
    whole = "<image><|image_pad|></image>"
    assert rewrite("a<|image_pad|>b<|image_pad|>") == (
        f"a<image_id>0</image_id>{whole}{row}\n{row}b<image_id>1</image_id>{whole}"
    )
    ids, images = expand_image_tokens([900] * 6, [cut, part], vision.rules)
    assert len(ids) == 2 + 4 + 1
    assert [image.is_tile for image in images] == [False, True, True, True, True, False]


@pytest.mark.parametrize("most", [1280, 1279, 400, 128])
def test_images_keep_to_the_limit_on_tokens(tmp_path, most):
    vision = read(tmp_path).vision
    assert vision is not None
    scaling = _within(vision.rules, most)
    assert isinstance(scaling, SliceScaling)
    tight = ImageRules(token_id=1, cell=56, scaling=scaling, max_images=1)
    assert _max_image_cells(tight) <= most

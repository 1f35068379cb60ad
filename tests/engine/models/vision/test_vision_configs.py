"""Image settings in a directory, as models are published and as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.images.types import AreaScaling, EdgeScaling, FixedScaling
from engine.models.checkpoint import ModelConfig, read_config
from engine.models.families import FAMILIES
from engine.models.vision.config import VisionConfig
from engine.models.vision.families import FAMILIES as VISION_FAMILIES
from engine.models.vision.spec import AxialRope
from tests import tiny_vision, tiny_vision_pixels

_TEXT = {
    **{
        "vocab_size": 160_000,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-6,
    },
    **{"num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"rope_theta": 10000.0, "hidden_act": "silu"},
}
_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
# model_type -> (config.json, preprocessor_config.json), with the vision config as published.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        {
            **{
                **_TEXT,
                "hidden_size": 1536,
                "num_attention_heads": 12,
                "image_token_id": 151_655,
                "vision_token_id": 151_654,
            },
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vision_config": {
                **{"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3},
                **{"hidden_size": 1536, "patch_size": 14, "spatial_merge_size": 2},
                **{"spatial_patch_size": 14, "temporal_patch_size": 2},
            },
        },
        {
            **{"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "merge_size": 2},
            **{"temporal_patch_size": 2, "image_mean": _CLIP_MEAN, "image_std": _CLIP_STD},
            **{"image_processor_type": "Qwen2VLImageProcessor"},
            **{"processor_class": "Qwen2VLProcessor"},
        },
    ),
    "qwen2_5_vl": (
        {
            **{**_TEXT, "hidden_size": 2048, "num_attention_heads": 16, "image_token_id": 151_655},
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vision_config": {
                **{"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "num_heads": 16},
                **{"intermediate_size": 3420, "in_chans": 3, "out_hidden_size": 2048},
                **{"patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14},
                **{"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
                **{"tokens_per_second": 2, "temporal_patch_size": 2, "torch_dtype": "bfloat16"},
            },
        },
        {
            **{"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True},
            **{"size": {"shortest_edge": 3136, "longest_edge": 12_845_056}, "resample": 3},
            **{"rescale_factor": 1 / 255, "patch_size": 14, "merge_size": 2, "crop_size": None},
            **{"temporal_patch_size": 2, "image_mean": _CLIP_MEAN, "image_std": _CLIP_STD},
        },
    ),
    "qwen3_vl": (
        {
            "text_config": {
                "model_type": "qwen3_vl_text",
                **_TEXT,
                "num_attention_heads": 32,
                "hidden_size": 2560,
                "head_dim": 128,
                "dtype": "bfloat16",
            },
            "image_token_id": 151_655,
            "vision_config": {
                **{"depth": 24, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1024},
                **{"in_channels": 3, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16},
                **{"num_position_embeddings": 2304, "out_hidden_size": 2560},
                **{"spatial_merge_size": 2, "temporal_patch_size": 2, "model_type": "qwen3_vl"},
                **{"deepstack_visual_indexes": [5, 11, 17], "initializer_range": 0.02},
            },
        },
        {
            **{"size": {"longest_edge": 16_777_216, "shortest_edge": 65_536}, "patch_size": 16},
            **{"temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5]},
            **{"image_std": [0.5, 0.5, 0.5], "processor_class": "Qwen3VLProcessor"},
            **{"image_processor_type": "Qwen2VLImageProcessorFast"},
        },
    ),
    "llava": (
        {
            **{"ignore_index": -100, "image_token_index": 32000, "projector_hidden_act": "gelu"},
            **{"vision_feature_select_strategy": "default", "vision_feature_layer": -2},
            "text_config": {
                **{"_name_or_path": "lmsys/vicuna-7b-v1.5", "max_position_embeddings": 4096},
                **{"model_type": "llama", "rms_norm_eps": 1e-5, "torch_dtype": "float16"},
                **{"vocab_size": 32064, "num_hidden_layers": 4},
            },
            "vision_config": {
                **{"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096},
                **{"model_type": "clip_vision_model", "num_attention_heads": 16},
                **{"num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768},
                "vocab_size": 32000,
            },
        },
        {
            **{"crop_size": {"height": 336, "width": 336}, "do_center_crop": True},
            **{"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True},
            **{"image_mean": _CLIP_MEAN, "image_std": _CLIP_STD, "rescale_factor": 1 / 255},
            **{"image_processor_type": "CLIPImageProcessor", "resample": 3},
            "_valid_processor_keys": ["images", "do_resize"],
            **{"processor_class": "LlavaProcessor", "size": {"shortest_edge": 336}},
        },
    ),
    "mistral3": (
        {
            "text_config": {
                "model_type": "mistral",
                **_TEXT,
                "num_attention_heads": 32,
                "hidden_size": 5120,
                "head_dim": 128,
            },
            **{"image_token_index": 10, "multimodal_projector_bias": False},
            **{"projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1},
            "vision_config": {
                **{"attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu"},
                **{"hidden_size": 1024, "image_size": 1540, "initializer_range": 0.02},
                **{"intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16},
                **{"num_channels": 3, "num_hidden_layers": 24, "patch_size": 14},
                "rope_theta": 10000.0,
            },
        },
        {
            **{"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True},
            **{"image_mean": _CLIP_MEAN, "image_std": _CLIP_STD, "rescale_factor": 1 / 255},
            **{"image_processor_type": "PixtralImageProcessorFast", "resample": 3},
            **{"patch_size": 14, "processor_class": "PixtralProcessor"},
            "size": {"longest_edge": 1540},
        },
    ),
}


def read(directory: Path, kind: str, *, vision: Any = None, processor: Any = None) -> ModelConfig:
    """The settings read from a published model with some keys of these parts changed."""
    config, published = PUBLISHED[kind]
    changed = {**config["vision_config"], **(vision or {})}
    config = {"model_type": kind, **config, "vision_config": changed}
    (directory / "config.json").write_text(json.dumps(config))
    whole = json.dumps({**published, **(processor or {})})
    (directory / "preprocessor_config.json").write_text(whole)
    return read_config(str(directory))


def vision_of(config: ModelConfig) -> VisionConfig:
    assert config.vision is not None, config.vision_unsupported_reason
    return config.vision


@pytest.mark.parametrize(
    ("kind", "cell", "scaling"),
    [
        ("qwen2_vl", 28, AreaScaling(3136, 12_845_056)),
        ("qwen2_5_vl", 28, AreaScaling(3136, 12_845_056)),
        ("qwen3_vl", 32, AreaScaling(65_536, 16_777_216)),
        ("mistral3", 28, EdgeScaling(1540)),
        ("llava", 14, FixedScaling(336, crop=True)),
    ],
)
def test_published_models(tmp_path, kind, cell, scaling):
    vision = vision_of(read(tmp_path, kind))
    assert (vision.rules.cell, vision.rules.scaling) == (cell, scaling)
    (tmp_path / "preprocessor_config.json").unlink()
    again = vision_of(read_config(str(tmp_path)))  # published values are the defaults
    assert (again.spec, again.rules) == (vision.spec, vision.rules)


def test_windows_and_features_of_published_models(tmp_path):
    spec = vision_of(read(tmp_path, "qwen2_5_vl")).spec
    assert spec.window == 4
    assert [i for i in range(32) if not spec.is_windowed(i)] == [7, 15, 23, 31]
    spec = vision_of(read(tmp_path, "qwen3_vl")).spec
    assert (spec.deepstack_layers, spec.position_grid_size) == ((5, 11, 17), 48)
    spec = vision_of(read(tmp_path, "llava")).spec
    assert (spec.num_layers, spec.num_skipped_layers, spec.num_positions) == (23, 1, 577)
    spec = vision_of(read(tmp_path, "mistral3")).spec
    assert (spec.rope, spec.activation) == (AxialRope(10_000.0, staggered=True), "silu")


@pytest.mark.parametrize("kind", ["llava_clip", "llava_siglip", "qwen2_vl", "qwen3_vl", "mistral3"])
def test_what_transformers_saves_of_a_processor(tmp_path, kind):
    """In a file of its own, and as a section of the newer file, which takes precedence."""
    tiny_vision.save(kind, tmp_path)
    processor = tiny_vision_pixels.processor(kind)
    if kind.startswith("llava"):
        is_clip = kind == "llava_clip"
        scaling = FixedScaling(28 if is_clip else 44, crop=is_clip)
    elif kind == "mistral3":
        processor.size = {"longest_edge": 700}
        scaling = EdgeScaling(700)
    else:
        processor.size = {"shortest_edge": 5000, "longest_edge": 70_000}
        scaling = AreaScaling(5000, 70_000)
    processor.save_pretrained(tmp_path)
    assert vision_of(read_config(str(tmp_path))).rules.scaling == scaling
    saved = (tmp_path / "preprocessor_config.json").read_text()
    section = {"image_processor": json.loads(saved), "processor_class": "Some", "other": 1}
    (tmp_path / "processor_config.json").write_text(json.dumps(section))
    (tmp_path / "preprocessor_config.json").write_text("[]")
    assert vision_of(read_config(str(tmp_path))).rules.scaling == scaling


@pytest.mark.parametrize(
    ("processor", "bounds"),
    [
        ({"min_pixels": None, "max_pixels": None}, (3136, 12_845_056)),
        ({"min_pixels": 10_000, "max_pixels": 100_000}, (10_000, 100_000)),
        ({"size": {"min_pixels": 1, "max_pixels": 2}}, (3136, 12_845_056)),
        (
            {"size": {"min_pixels": 9, "max_pixels": 99}, "min_pixels": None, "max_pixels": None},
            (9, 99),
        ),
    ],
)
def test_spellings_of_the_bounds(tmp_path, processor, bounds):
    """As in transformers, those outside of ``size`` take precedence."""
    vision = vision_of(read(tmp_path, "qwen2_vl", processor=processor))
    assert vision.rules.scaling == AreaScaling(*bounds)


def test_tokens_behind_rows_are_found_by_name(tmp_path):
    names = {"[IMG]": 10, "<row>": 77, "[IMG_END]": 78}
    tokens = [{"id": id_, "content": name, "special": True} for name, id_ in names.items()]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    reason = read(tmp_path, "mistral3").vision_unsupported_reason
    assert reason is not None
    assert reason.endswith("tokenizer.json: has no token '[IMG_BREAK]'")
    (tmp_path / "processor_config.json").write_text('{"image_break_token": "<row>"}')
    rules = vision_of(read(tmp_path, "mistral3")).rules
    assert (rules.token_id, rules.row_end_id, rules.end_id) == (10, 77, 78)
    (tmp_path / "processor_config.json").write_text('{"image_break_token": {"content": "<row>"}}')
    assert "has no token {'content'" in str(read(tmp_path, "mistral3").vision_unsupported_reason)
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": -1, "content": "x"}]}')
    assert "is not a tokenizer" in str(read(tmp_path, "mistral3").vision_unsupported_reason)


def test_families_and_configs_without_images(tmp_path):
    config, _ = PUBLISHED["qwen2_vl"]
    text = {key: value for key, value in config.items() if key != "vision_config"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl", **text}))
    without = read_config(str(tmp_path))
    assert (without.vision, without.vision_unsupported_reason) == (None, None)


@pytest.mark.parametrize(
    ("kind", "vision", "processor", "reason"),
    [
        ("qwen2_vl", {"hidden_act": "gelu_fast"}, {}, "'hidden_act' is 'gelu_fast'; known: gelu,"),
        ("qwen2_vl", {"hidden_size": 1000}, {}, "makes embeddings of 1000 dimensions, the text"),
        ("qwen2_vl", {"num_heads": 7}, {}, "'num_heads' must divide the 1280 dimensions"),
        ("qwen2_vl", {"embed_dim": 90, "num_heads": 15}, {}, "makes heads of 6 dimensions"),
        ("qwen2_vl", {"new_key": 1}, {}, "'vision_config': unsupported keys: 'new_"),
        ("qwen2_vl", {"in_chans": 4}, {}, "'in_chans' is 4; only 3 is supported"),
        ("qwen2_vl", {"rope_parameters": {"rope_type": "x"}}, {}, "'rope_type' is 'x'"),
        ("qwen2_5_vl", {"window_size": 27}, {}, "'window_size' is less than a cell of 28"),
        ("qwen2_5_vl", {"fullatt_block_indexes": [True]}, {}, "must be a list of layers"),
        ("qwen3_vl", {"num_position_embeddings": 7}, {}, "'num_position_embeddings' of 7 make no"),
        ("qwen3_vl", {"deepstack_visual_indexes": [24]}, {}, "must be some of the layers"),
        ("qwen3_vl", {"deepstack_visual_indexes": [0, 1, 2, 3, 4]}, {}, "has more deep layers"),
        ("mistral3", {"head_dim": 32}, {}, "'head_dim' is 32; only 64 is supported"),
        ("llava", {"model_type": "vit"}, {}, "'model_type' is 'vit'; known: clip_vision_model"),
        ("llava", {"model_type": "siglip_vision_model"}, {}, "'default'; only 'full' is supported"),
        ("llava", {"image_size": 13}, {}, "'image_size' of 13 is less than a patch of 14"),
        ("llava", {"num_hidden_layers": 1}, {}, "'vision_feature_layer' is -2; there are 1 layers"),
        ("llava", {}, {"crop_size": {"height": 224, "width": 224}}, "'crop_size' is {'height': 22"),
        ("llava", {}, {"size": {"shortest_edge": 400}}, "'size' is {'shortest_edge': 400}; only"),
        ("llava", {}, {"do_pad": True}, "'do_pad' is True; only False is supported"),
        ("qwen2_vl", {}, {"patch_size": 16}, "'patch_size' is 16; only 14 is supported"),
        ("qwen2_vl", {}, {"do_center_crop": True}, "'do_center_crop' is True"),
        ("qwen2_vl", {}, {"resample": 4}, "'resample' is 4; known: 1 (lanczos), 2"),
        ("qwen2_vl", {}, {"image_mean": [0.5]}, "'image_mean' must be three numbers"),
        ("qwen2_vl", {}, {"min_pixels": 13_000_000}, "is less than the 13000000 of min_pixels"),
        ("qwen2_vl", {}, {"do_shear": True}, "unsupported keys: 'do_shear'"),
    ],
)
def test_images_that_are_not_served_leave_the_text(tmp_path, kind, vision, processor, reason):
    config = read(tmp_path, kind, vision=vision, processor=processor)
    assert config.vision is None
    assert config.vision_unsupported_reason is not None
    assert reason in config.vision_unsupported_reason
    assert str(tmp_path) in config.vision_unsupported_reason
    assert config.spec.num_layers == 4


def test_what_is_told_of_families():
    for name, family in FAMILIES.items():
        assert ("accepts images" in family.differences) == (name in VISION_FAMILIES)


def test_tokens_beyond_the_vocabulary(tmp_path):
    tiny_vision.save("qwen2_vl", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(
        path.read_text().replace(f'"image_token_id": {tiny_vision.IMAGE}', '"image_token_id": 160')
    )
    assert "lie beyond the vocabulary" in str(read_config(str(tmp_path)).vision_unsupported_reason)

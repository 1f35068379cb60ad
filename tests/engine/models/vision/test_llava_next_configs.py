"""Settings of LLaVA-NeXT, Granite Vision and LLaVA-OneVision as they were published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from engine.images.types import AnyresScaling, TileRewrite
from engine.models.checkpoint import ModelConfig, read_config
from engine.models.spec import DecoderSpec
from engine.models.vision.config import VisionConfig
from engine.runner.image_load import _max_image_cells, _within
from tests import tiny_vision
from tests.engine.models.vision.test_tower_checkpoints import load, same

_CLIP = {
    **{"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "patch_size": 14},
    **{"model_type": "clip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 24},
    **{"projection_dim": 768, "vocab_size": 32_000},
}
_SIGLIP = {
    **{"hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "patch_size": 14},
    **{"model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27},
    **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
_GRANITE = {
    **{"model_type": "granite", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 49_156},
    **{"num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2},
    **{"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0},
    **{"residual_multiplier": 0.22, "max_position_embeddings": 16_384, "rope_theta": 300_000},
}
_QWEN2 = {
    **{"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 152_000},
    **{"num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2},
    **{"tie_word_embeddings": True, "rope_theta": 1_000_000.0},
}
_NEXT_SIZES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_SIZES = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
_MEAN, _STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_DONE = {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True}
# kind -> (config.json, preprocessor_config.json, the token for images)
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, str]]] = {
    "llava_next": (
        {
            **{"model_type": "llava_next", "ignore_index": -100, "image_token_index": 32_000},
            **{"image_grid_pinpoints": _NEXT_SIZES, "projector_hidden_act": "gelu"},
            **{"tie_word_embeddings": False, "use_image_newline_parameter": True},
            **{"vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
            "text_config": {"model_type": "mistral", "vocab_size": 32_064, "rope_theta": 1e6},
            "vision_config": _CLIP,
        },
        {
            **{**_DONE, "crop_size": {"height": 336, "width": 336}, "do_center_crop": True},
            **{"image_grid_pinpoints": _NEXT_SIZES, "image_mean": _MEAN, "image_std": _STD},
            **{"image_processor_type": "LlavaNextImageProcessor", "resample": 3, "do_pad": True},
            "size": {"shortest_edge": 336},
        },
        (32_000, "<image>"),
    ),
    "granite": (
        {
            **{"model_type": "llava_next", "image_token_index": 49_155, "image_seq_length": 576},
            **{"image_grid_pinpoints": [[384, 768], [3840, 384]], "projector_hidden_act": "gelu"},
            **{"tie_word_embeddings": True, "use_image_newline_parameter": True},
            **{"multimodal_projector_bias": True, "pretrained_language_model": ""},
            **{"pretrained_vision_tower": "", "vision_feature_layer": [-24, -20, -12, -1]},
            **{"vision_feature_select_strategy": "full", "text_config": _GRANITE},
            "vision_config": _SIGLIP,
        },
        {
            **{**_DONE, "crop_size": {"height": 384, "width": 384}, "do_center_crop": True},
            **{"image_grid_pinpoints": [[384, 768], [3840, 384]], "image_mean": [0.5] * 3},
            **{"image_std": [0.5] * 3, "resample": 3, "size": {"height": 384, "width": 384}},
        },
        (49_155, "<image>"),
    ),
    "llava_onevision": (
        {
            **{"model_type": "llava_onevision", "image_token_index": 151_646},
            **{"image_grid_pinpoints": _SIZES, "projector_hidden_act": "gelu"},
            **{"tie_word_embeddings": False, "use_image_newline_parameter": True},
            **{"video_token_index": 151_647, "vision_aspect_ratio": "anyres_max_9"},
            **{"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
            "text_config": _QWEN2,
            "vision_config": {**_SIGLIP, "num_hidden_layers": 26, "vision_use_head": False},
        },
        {
            **{**_DONE, "image_grid_pinpoints": _SIZES, "image_mean": _MEAN, "image_std": _STD},
            **{"image_processor_type": "LlavaOnevisionImageProcessor", "resample": 3},
            **{"do_pad": True, "size": {"height": 384, "width": 384}},
        },
        (151_646, "<image>"),
    ),
}


def read(
    directory: Path, kind: str, *, vision: Any = None, processor: Any = None, **whole: Any
) -> ModelConfig:
    config, prepared, (id_, name) = PUBLISHED[kind]
    changed = {**config, **whole, "vision_config": {**config["vision_config"], **(vision or {})}}
    for file, contents in (
        ("config.json", changed),
        ("preprocessor_config.json", {**prepared, **(processor or {})}),
        ("tokenizer.json", {"added_tokens": [{"id": id_, "content": name}]}),
    ):
        (directory / file).write_text(json.dumps(contents))
    return read_config(str(directory))


def vision_of(config: ModelConfig) -> VisionConfig:
    assert config.vision is not None, config.vision_unsupported_reason
    return config.vision


def test_llava_next_as_published(tmp_path):
    config = read(tmp_path, "llava_next")
    assert isinstance(config.spec, DecoderSpec)
    assert (config.spec.hidden_size, config.spec.layers[0].window) == (4096, 4096)
    vision = vision_of(config)
    assert vision.rules.scaling == AnyresScaling(336, ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3)))
    assert vision.rules.rewriting == TileRewrite(
        *("<image>", "<image>"), whole="<image>", alone="<image>"
    )
    assert (vision.spec.num_layers, vision.spec.num_skipped_layers) == (23, 1)
    (tmp_path / "preprocessor_config.json").unlink()
    assert vision_of(read_config(str(tmp_path))) == vision  # published values are the defaults


def test_granite_vision_as_published(tmp_path):
    config = read(tmp_path, "granite")
    assert isinstance(config.spec, DecoderSpec)
    assert config.spec.tie_word_embeddings
    spec = vision_of(config).spec
    assert (spec.feature_layers, spec.num_layers) == ((4, 8, 16, 27), 27)
    assert (spec.out_scale, spec.pixels.mean) == (12.0, (0.5,) * 3)


def test_llava_onevision_as_published(tmp_path):
    config = read(tmp_path, "llava_onevision")
    assert isinstance(config.spec, DecoderSpec)
    assert config.spec.tie_word_embeddings, "whatever the outer config says"
    vision = vision_of(config)
    grids = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7))
    scaling = AnyresScaling(384, grids, max_area=9, border=(122, 116, 104))
    assert vision.rules.scaling == scaling
    (tmp_path / "preprocessor_config.json").unlink()
    assert vision_of(read_config(str(tmp_path))) == vision
    half = read(tmp_path, "llava_onevision", processor={"image_mean": [0.5] * 3})
    assert vision_of(half).rules.scaling == AnyresScaling(384, grids, 9, (127, 127, 127))


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("llava_next", {"image_grid_pinpoints": [[336, 700]]}, "has [336, 700]: no tiles of 336"),
        ("llava_next", {"image_grid_pinpoints": [[336 * 300, 336]]}, "of more than 256 tiles"),
        ("llava_next", {"vision": {"model_type": "pixtral"}}, "is 'pixtral'; known: clip_vision"),
        ("llava_next", {"vision_feature_select_strategy": "full"}, "only 'default' is supported"),
        ("llava_next", {"processor": {"image_grid_pinpoints": [[336, 672]]}}, "is [[336, 672]];"),
        ("llava_next", {"processor": {"size": {"shortest_edge": 224}}}, "'size' is {'shortest"),
        ("granite", {"vision_feature_layer": [-1, 0]}, "is (-1, 0); there are 27 layers"),
        ("granite", {"vision_feature_layer": ["a"]}, "must be a layer or a list of layers"),
        ("llava_onevision", {"vision_aspect_ratio": "pad"}, "is 'pad'; known: 'anyres_max_N'"),
    ],
)
def test_images_that_are_not_served_leave_the_text(tmp_path, kind, changes, reason):
    config = read(tmp_path, kind, **changes)
    assert config.vision is None
    assert reason in str(config.vision_unsupported_reason)
    assert config.spec.num_layers in (4, 32)


@pytest.mark.parametrize(
    ("most", "grids"), [(5000, 5), (2500, 4), (2000, 2), (1752, 1), (1751, 0), (600, 0)]
)
def test_images_keep_to_the_limit_on_tokens(tmp_path, most, grids):
    """Down to the view alone."""
    rules = vision_of(read(tmp_path, "llava_next")).rules
    scaling = _within(rules, most)
    assert isinstance(scaling, AnyresScaling)
    assert len(scaling.grids) == grids
    assert _max_image_cells(replace(rules, scaling=scaling)) <= most


@pytest.mark.parametrize("kind", ["llava_next", "llava_next_granite", "llava_onevision"])
def test_names_of_newer_exports(tmp_path, kind):
    """With the outer model's name first, also for the embedding that ends rows."""
    tiny_vision.save(kind, tmp_path)
    before = load(tmp_path)
    path = tmp_path / "model.safetensors"
    inner = ("vision_tower.", "multi_modal_projector.", "image_newline")
    tensors = {
        f"model.{name}" if name.startswith(inner) else name: tensor
        for name, tensor in load_file(path).items()
    }
    assert "model.image_newline" in tensors
    save_file(tensors, path)
    after = load(tmp_path)
    assert same(after, before)
    assert after._newline is not None
    assert torch.equal(after._newline, before._newline)

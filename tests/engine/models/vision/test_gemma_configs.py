"""Image settings in Gemma's directories, as models are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.images.types import BudgetScaling, FixedScaling, PlaceholderRewrite
from engine.models.checkpoint import ModelConfig, read_config
from engine.models.spec import DecoderSpec
from engine.models.vision.config import VisionConfig
from engine.models.vision.spec import PoolSpec

_HALF = [0.5, 0.5, 0.5]
# What the published configs omit is omitted here: the text model's defaults apply.
GEMMA3: dict[str, Any] = {
    **{"boi_token_index": 255_999, "eoi_token_index": 256_000, "eos_token_id": [1, 106]},
    **{"image_token_index": 262_144, "mm_tokens_per_image": 256, "model_type": "gemma3"},
    "text_config": {
        **{"hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text"},
        **{"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        "sliding_window": 1024,
    },
    "vision_config": {
        **{"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304},
        **{"model_type": "siglip_vision_model", "num_attention_heads": 16},
        **{"num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False},
    },
}
GEMMA3_PROCESSOR = {
    **{"do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True},
    **{"do_resize": True, "image_mean": _HALF, "image_std": _HALF, "image_seq_length": 256},
    **{"image_processor_type": "Gemma3ImageProcessor", "pan_and_scan_max_num_crops": None},
    **{"pan_and_scan_min_crop_size": None, "pan_and_scan_min_ratio_to_activate": None},
    **{"processor_class": "Gemma3Processor", "resample": 2, "rescale_factor": 1 / 255},
    "size": {"height": 896, "width": 896},
}
GEMMA4: dict[str, Any] = {
    **{"model_type": "gemma4", "boi_token_id": 255_999, "eoi_token_id": 258_882},
    **{"image_token_id": 258_880, "vision_soft_tokens_per_image": 280},
    "text_config": {
        **{"model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144},
        **{"num_attention_heads": 8, "num_key_value_heads": 1, "num_hidden_layers": 6},
        **{"vocab_size": 262_144, "use_bidirectional_attention": "vision"},
        **{"hidden_size_per_layer_input": 0, "sliding_window": 512, "pad_token_id": 0},
    },
    "vision_config": {
        **{"model_type": "gemma4_vision", "hidden_size": 768, "num_hidden_layers": 16},
        **{"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64},
        **{"intermediate_size": 3072, "global_head_dim": 64, "default_output_length": 280},
        **{"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}},
        **{"standardize": False, "use_clipped_linears": True, "attention_bias": False},
        **{"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072},
        **{"patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10_240},
    },
}
GEMMA4_PROCESSOR = {
    **{"do_convert_rgb": True, "do_normalize": False, "do_rescale": True, "do_resize": True},
    **{"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "max_soft_tokens": 280, "resample": 3},
    **{"image_processor_type": "Gemma4ImageProcessor", "image_seq_length": 280},
    **{"patch_size": 16, "pooling_kernel_size": 3, "rescale_factor": 1 / 255},
}
GEMMA4_UNIFIED: dict[str, Any] = {
    **{"model_type": "gemma4_unified", "boi_token_id": 255_999, "eoi_token_id": 258_882},
    **{"image_token_id": 258_880, "vision_soft_tokens_per_image": 280},
    "text_config": {
        **{"model_type": "gemma4_unified_text", "hidden_size": 3840, "intermediate_size": 15_360},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 6},
        **{"vocab_size": 262_144, "sliding_window": 1024, "pad_token_id": 0},
    },
    "vision_config": {
        **{"model_type": "gemma4_unified_vision", "patch_size": 16, "pooling_kernel_size": 3},
        **{"mm_embed_dim": 3840, "mm_posemb_size": 1120, "output_proj_dims": 3840},
        **{"rms_norm_eps": 1e-6, "initializer_range": 0.02},
    },
}
PUBLISHED = {
    "gemma3": (GEMMA3, GEMMA3_PROCESSOR),
    "gemma4": (GEMMA4, GEMMA4_PROCESSOR),
    "gemma4_unified": (GEMMA4_UNIFIED, GEMMA4_PROCESSOR),
}
NAMES = {
    "gemma3": {
        **{255_999: "<start_of_image>", 256_000: "<end_of_image>"},
        262_144: "<image_soft_token>",
    },
    "gemma4": {255_999: "<begin>", 258_880: "<image>", 258_882: "<end>"},
    "gemma4_unified": {255_999: "<begin>", 258_880: "<image>", 258_882: "<end>"},
}


def read(
    directory: Path,
    kind: str,
    *,
    vision: Any = None,
    processor: Any = None,
    whole: Any = None,
    names: dict[int, str] | None = None,
) -> ModelConfig:
    """The settings read from a published model with some keys of these parts changed."""
    config, published = PUBLISHED[kind]
    changed = {**config["vision_config"], **(vision or {})}
    config = {**config, "vision_config": changed, **(whole or {})}
    (directory / "config.json").write_text(json.dumps(config))
    prepared = {"image_processor": {**published, **(processor or {})}}
    (directory / "processor_config.json").write_text(json.dumps(prepared))
    added = [{"id": id_, "content": name} for id_, name in (names or NAMES[kind]).items()]
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return read_config(str(directory))


def vision_of(config: ModelConfig) -> VisionConfig:
    assert config.vision is not None, config.vision_unsupported_reason
    return config.vision


def test_gemma_3_as_published(tmp_path):
    config = read(tmp_path, "gemma3")
    spec = config.spec
    assert isinstance(spec, DecoderSpec)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 4, 256)
    assert (spec.vocab_size, spec.eos_token_ids) == (262_208, (1, 106))
    assert all(layer.bidirectional_images for layer in spec.layers)
    vision = vision_of(config)
    rules = vision.rules
    assert (rules.token_id, rules.cell, rules.resampling) == (262_144, 56, "bilinear")
    assert rules.scaling == FixedScaling(896, crop=False)
    whole = "<start_of_image><image_soft_token><end_of_image>"
    assert rules.rewriting == PlaceholderRewrite("<start_of_image>", f"\n\n{whole}\n\n")
    assert vision.spec.merger == PoolSpec(1e-6, weighted=True, inputs_first=True)
    (tmp_path / "processor_config.json").unlink()
    assert vision_of(read_config(str(tmp_path))) == vision  # published values are the defaults


def test_gemma_4_as_published(tmp_path):
    config = read(tmp_path, "gemma4")
    spec = config.spec
    assert isinstance(spec, DecoderSpec)
    ahead = [layer.bidirectional_images for layer in spec.layers]
    assert ahead == [layer.window is not None for layer in spec.layers]
    assert True in ahead
    vision = vision_of(config)
    rules = vision.rules
    assert (rules.token_id, rules.cell, rules.resampling) == (258_880, 48, "bicubic")
    assert rules.scaling == BudgetScaling(280)
    assert rules.rewriting == PlaceholderRewrite("<image>", "<begin><image><end>")
    assert vision.spec.clipped
    assert (vision.spec.pixels.mean, vision.spec.pixels.std) == ((0.5,) * 3, (0.5,) * 3)
    (tmp_path / "processor_config.json").unlink()
    assert vision_of(read_config(str(tmp_path))) == vision


def test_gemma_4_without_an_encoder(tmp_path):
    """Tokens of an image see each other unless the config says otherwise."""
    config = read(tmp_path, "gemma4_unified")
    spec = config.spec
    assert isinstance(spec, DecoderSpec)
    assert spec.bidirectional_images
    vision = vision_of(config)
    assert (vision.rules.cell, vision.rules.scaling) == (48, BudgetScaling(280))
    assert (vision.spec.num_layers, vision.spec.patch_size, vision.spec.merge_size) == (0, 48, 1)
    (tmp_path / "processor_config.json").unlink()
    assert vision_of(read_config(str(tmp_path))) == vision


def test_larger_images_of_gemma_4(tmp_path):
    found = vision_of(read(tmp_path, "gemma4", processor={"max_soft_tokens": 1120}))
    assert found.rules.scaling == BudgetScaling(1120)
    identity = {"do_normalize": True}  # with a mean of zero and a deviation of one: no change
    assert vision_of(read(tmp_path, "gemma4", processor=identity)).spec == found.spec


def test_gemma_without_a_tokenizer_is_told_no_names(tmp_path):
    read(tmp_path, "gemma3")
    (tmp_path / "tokenizer.json").unlink()
    assert vision_of(read_config(str(tmp_path))).rules.rewriting is None


@pytest.mark.usefixtures("all_keys_matter")
@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("gemma3", {"vision": {"model_type": "clip"}}, "'model_type' is 'clip'; only 'siglip"),
        ("gemma3", {"whole": {"mm_tokens_per_image": 255}}, "of 255 makes no square of whole"),
        ("gemma3", {"whole": {"mm_tokens_per_image": 9}}, "of 9 makes no square of whole patches"),
        ("gemma3", {"processor": {"do_pan_and_scan": True}}, "'do_pan_and_scan' is True"),
        ("gemma3", {"processor": {"size": {"height": 9, "width": 9}}}, "'size' is {'height': 9"),
        ("gemma3", {"names": {255_999: "<a>"}}, "has no name for token 262144, of images"),
        ("gemma4", {"vision": {"num_key_value_heads": 4}}, "'num_key_value_heads' is 4; only 12"),
        ("gemma4", {"vision": {"attention_bias": True}}, "'attention_bias' is True"),
        ("gemma4", {"vision": {"new_key": 1}}, "unsupported keys: 'new_key'"),
        ("gemma4_unified", {"vision": {"output_proj_dims": 64}}, "'output_proj_dims' is 64; only"),
        ("gemma4_unified", {"processor": {"patch_size": 48}}, "'patch_size' is 48; only 16"),
        ("gemma4", {"processor": {"max_soft_tokens": 3414}}, "positions for 10240 patches along"),
        ("gemma4", {"processor": {"pooling_kernel_size": 2}}, "'pooling_kernel_size' is 2; only 3"),
        (
            "gemma4",
            {"processor": {"do_normalize": True, "image_mean": _HALF}},
            "'image_mean' is [0.5, 0.5, 0.5]; only [0.0, 0.0, 0.0]",
        ),
    ],
)
def test_images_that_are_not_served_leave_the_text(tmp_path, kind, changes, reason):
    config = read(tmp_path, kind, **changes)
    assert config.vision is None
    assert config.vision_unsupported_reason is not None
    assert reason in config.vision_unsupported_reason
    assert isinstance(config.spec, DecoderSpec)

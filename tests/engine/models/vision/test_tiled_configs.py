"""Settings of models that see images in tiles, as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelLoadError
from engine.images.types import GridScaling, TileRewrite, TileScaling
from engine.models.checkpoint import ModelConfig, read_config
from engine.models.spec import DecoderSpec
from engine.models.vision.config import VisionConfig
from engine.models.vision.spec import MergerSpec, VisionNorm

_SMOLVLM: dict[str, Any] = {
    **{"model_type": "smolvlm", "image_token_id": 49_190, "pad_token_id": 128_002},
    **{"scale_factor": 4, "tie_word_embeddings": False, "torch_dtype": "float32"},
    **{"use_cache": False, "use_reentrant_checkpointing": False, "vocab_size": 49_280},
    "text_config": {
        **{"architectures": ["VLlama3ForCausalLM"], "head_dim": 64, "hidden_size": 960},
        **{"intermediate_size": 2560, "is_llama_config": True, "max_position_embeddings": 8192},
        **{"model_type": "llama", "neftune_noise_alpha": 0.0, "num_attention_heads": 15},
        **{"num_hidden_layers": 4, "num_key_value_heads": 5, "pad_token_id": 2},
        **{"pixel_shuffle_factor": 4, "qk_layer_norms": False, "rms_norm_eps": 1e-5},
        **{"rope_interleaved": False, "rope_theta": 100_000, "torch_dtype": "bfloat16"},
        **{"use_resampler": False, "vocab_size": 49_280},
    },
    "vision_config": {
        **{"hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512}},
        **{"model_type": "smolvlm_vision", "num_attention_heads": 12, "patch_size": 16},
        **{"size": {"longest_edge": 2048}, "tie_word_embeddings": False},
        "use_base_siglip": False,
    },
}
_INTERNVL: dict[str, Any] = {
    **{"model_type": "internvl", "downsample_ratio": 0.5, "image_seq_length": 256},
    **{"image_token_id": 151_667, "projector_hidden_act": "gelu", "torch_dtype": "bfloat16"},
    **{"vision_feature_layer": -1, "vision_feature_select_strategy": "default"},
    "text_config": {
        **{"architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864},
        **{"max_position_embeddings": 32_768, "max_window_layers": 70, "model_type": "qwen2"},
        **{"num_attention_heads": 14, "num_hidden_layers": 4, "num_key_value_heads": 2},
        **{"rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": None},
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
        **{"use_sliding_window": False, "vocab_size": 151_674, "eos_token_id": 151_645},
    },
    "vision_config": {
        **{"architectures": ["InternVisionModel"], "attention_bias": True, "dropout": 0.0},
        **{"attention_dropout": 0.0, "hidden_act": "gelu", "hidden_dropout_prob": 0.0},
        **{"hidden_size": 1024, "image_size": [448, 448], "initializer_factor": 0.1},
        **{"initializer_range": 1e-10, "intermediate_size": 4096, "layer_norm_eps": 1e-6},
        **{"layer_scale_init_value": 0.1, "model_type": "internvl_vision"},
        **{"norm_type": "layer_norm", "num_attention_heads": 16, "num_channels": 3},
        **{"num_hidden_layers": 24, "patch_size": [14, 14], "projection_dropout": 0.0},
        **{"torch_dtype": "bfloat16", "use_absolute_position_embeddings": True},
        **{"use_mask_token": False, "use_mean_pooling": True, "use_qk_norm": False},
    },
}
_DONE = {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True}
# kind -> (config.json, preprocessor_config.json, processor_config.json, added tokens)
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[int, str]]] = {
    "smolvlm": (
        _SMOLVLM,
        {
            **{**_DONE, "do_image_splitting": True, "do_pad": True},
            **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255},
            **{"image_processor_type": "SmolVLMImageProcessor", "resample": 1},
            **{"max_image_size": {"longest_edge": 512}, "size": {"longest_edge": 2048}},
            "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}},
        },
        {"image_seq_len": 64, "processor_class": "SmolVLMProcessor"},
        {49_152: "<global-img>", 49_189: "<fake_token_around_image>", 49_190: "<image>"},
    ),
    "internvl": (
        _INTERNVL,
        {
            **{**_DONE, "crop_size": None, "crop_to_patches": False, "do_center_crop": None},
            **{"data_format": "channels_first", "default_to_square": True, "resample": 3},
            **{"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
            **{"image_processor_type": "GotOcr2ImageProcessorFast", "rescale_factor": 1 / 255},
            **{"max_patches": 12, "min_patches": 1, "size": {"height": 448, "width": 448}},
        },
        {"image_seq_length": 256, "processor_class": "InternVLProcessor"},
        {151_665: "<img>", 151_666: "</img>", 151_667: "<IMG_CONTEXT>"},
    ),
}


def read(
    directory: Path,
    kind: str,
    *,
    config: Any = None,
    vision: Any = None,
    text: Any = None,
    processor: Any = None,
    whole: Any = None,
    names: dict[int, str] | None = None,
) -> ModelConfig:
    """The settings read from a published model with some keys of these parts changed."""
    published, image_processor, other, added = PUBLISHED[kind]
    changed = {
        **published,
        "text_config": {**published["text_config"], **(text or {})},
        "vision_config": {**published["vision_config"], **(vision or {})},
        **(config or {}),
    }
    tokens = [{"id": id_, "content": name} for id_, name in (names or added).items()]
    for name, contents in (
        ("config.json", changed),
        ("preprocessor_config.json", {**image_processor, **(processor or {})}),
        ("processor_config.json", {**other, **(whole or {})}),
        ("tokenizer.json", {"added_tokens": tokens}),
    ):
        (directory / name).write_text(json.dumps(contents))
    return read_config(str(directory))


def vision_of(config: ModelConfig) -> VisionConfig:
    assert config.vision is not None, config.vision_unsupported_reason
    return config.vision


def text_of(config: ModelConfig) -> DecoderSpec:
    assert isinstance(config.spec, DecoderSpec)
    return config.spec


def test_smolvlm_as_published(tmp_path):
    config = read(tmp_path, "smolvlm")
    text = text_of(config)
    assert (text.num_heads, text.head_dim, text.norm.eps) == (15, 64, 1e-5)
    assert (text.architecture, text.tie_word_embeddings) == ("smolvlm", False)
    vision = vision_of(config)
    rules, spec = vision.rules, vision.spec
    assert (rules.token_id, rules.cell, rules.resampling) == (49_190, 64, "lanczos")
    assert rules.scaling == TileScaling(512, 2048)
    around = "<fake_token_around_image>"
    assert rules.rewriting == TileRewrite(
        "<image>",
        tile=f"{around}<row_{{row}}_col_{{column}}><image>",
        row_end="\n",
        whole=f"\n{around}<global-img><image>{around}",
        alone=f"{around}<global-img><image>{around}",
    )
    assert (spec.num_layers, spec.intermediate_size, spec.num_positions) == (12, 3072, 1024)
    assert spec.merger == MergerSpec(None, None, bias=False)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / name).unlink()
    assert vision_of(read_config(str(tmp_path))) == vision  # published values are the defaults


def test_internvl_as_published(tmp_path):
    config = read(tmp_path, "internvl")
    text = text_of(config)
    assert (text.eos_token_ids, text.tie_word_embeddings) == ((151_645,), False)
    vision = vision_of(config)
    rules, spec = vision.rules, vision.spec
    assert (rules.token_id, rules.cell, rules.resampling) == (151_667, 28, "bicubic")
    assert rules.scaling == GridScaling(448, 1, 12)
    one = "<IMG_CONTEXT>"
    assert rules.rewriting == TileRewrite(one, one, one, one, begin="<img>", end="</img>")
    assert (spec.num_positions, spec.qk_norm, spec.bias) == (1025, None, True)
    assert spec.pixels.mean == (0.485, 0.456, 0.406)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / name).unlink()
    assert vision_of(read_config(str(tmp_path))) == vision
    larger = {"attention_bias": False, "norm_type": "rms_norm", "use_qk_norm": True}
    spec = vision_of(read(tmp_path, "internvl", vision=larger)).spec
    assert (spec.norm, spec.qk_norm) == (VisionNorm("rms", 1e-6), VisionNorm("rms", 1e-6))


def test_what_the_training_of_internvl_3_5_left_in_its_configs(tmp_path):
    text = {"model_type": "qwen3", "head_dim": 64, "debug": False, "ep_size": 1}
    text |= {"micro_forward": False, "skip_checkpoint": False, "use_deepep": False}
    assert text_of(read(tmp_path, "internvl", text=text)).qk_norm


def test_heads_of_internvl_are_tied_as_its_text_model_says(tmp_path):
    """What is saved says in the outer config that they are tied, whatever they are."""
    outer = {"tie_word_embeddings": True}
    for tied in (True, False):
        config = read(tmp_path, "internvl", config=outer, text={"tie_word_embeddings": tied})
        assert text_of(config).tie_word_embeddings is tied
    assert text_of(read(tmp_path, "internvl", config=outer)).tie_word_embeddings


def test_images_that_are_not_cut(tmp_path):
    found = vision_of(read(tmp_path, "smolvlm", processor={"do_image_splitting": False}))
    assert found.rules.scaling == TileScaling(512, 2048, cuts=False)
    found = vision_of(read(tmp_path, "internvl", processor={"max_patches": 1}))
    assert found.rules.scaling == GridScaling(448, 1, 1)


@pytest.mark.usefixtures("all_keys_matter")
@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("smolvlm", {"vision": {"new_key": 1}}, "'vision_config': unsupported keys: 'new_key'"),
        ("smolvlm", {"config": {"scale_factor": 3}}, "'scale_factor' makes cells of 3 patches a"),
        (
            "smolvlm",
            {"processor": {"max_image_size": {"longest_edge": 364}}},
            "'max_image_size' is",
        ),
        ("smolvlm", {"processor": {"size": {"height": 512, "width": 512}}}, "'longest_edge' must"),
        ("smolvlm", {"processor": {"do_resize": False}}, "'do_resize' is False; only True is"),
        ("smolvlm", {"whole": {"image_seq_len": 81}}, "'image_seq_len' is 81; only 64 is"),
        ("smolvlm", {"names": {49_190: "<image>"}}, "has no token '<fake_token_around_image>'"),
        ("internvl", {"vision": {"new_key": 1}}, "'vision_config': unsupported keys: 'new_key'"),
        ("internvl", {"vision": {"image_size": [448, 224]}}, "'image_size' must be a square below"),
        ("internvl", {"vision": {"patch_size": 14.0}}, "'patch_size' must be a positive integer"),
        ("internvl", {"vision": {"image_size": 13}}, "'image_size' of 13 is less than a patch"),
        ("internvl", {"vision": {"norm_type": "batch"}}, "'norm_type' is 'batch'; known: layer_n"),
        ("internvl", {"vision": {"use_mean_pooling": False}}, "'use_mean_pooling' is False; only"),
        ("internvl", {"vision": {"use_mask_token": True}}, "'use_mask_token' is True; only False"),
        ("internvl", {"config": {"downsample_ratio": 0.4}}, "'downsample_ratio' is 0.4, which"),
        ("internvl", {"config": {"downsample_ratio": 0.01}}, "'downsample_ratio' is 0.01, which"),
        ("internvl", {"config": {"image_seq_length": 64}}, "'image_seq_length' is 64; only 256 is"),
        (
            "internvl",
            {"config": {"vision_feature_layer": -2}},
            "'vision_feature_layer' is -2; only",
        ),
        ("internvl", {"processor": {"min_patches": 13}}, "'max_patches' of 12 is less than the 13"),
        ("internvl", {"whole": {"image_seq_length": 64}}, "'image_seq_length' is 64; only 256 is"),
        ("internvl", {"names": {151_667: "<IMG_CONTEXT>"}}, "tokenizer.json: has no token '<img>'"),
    ],
)
def test_images_that_are_not_served_leave_the_text(tmp_path, kind, changes, reason):
    config = read(tmp_path, kind, **changes)
    assert config.vision is None
    assert reason in str(config.vision_unsupported_reason)
    assert str(tmp_path) in str(config.vision_unsupported_reason)
    assert config.spec.num_layers == 4


@pytest.mark.usefixtures("all_keys_matter")
@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("smolvlm", {"config": {"new_key": 1}}, "unsupported keys: 'new_key'"),
        ("smolvlm", {"text": {"new_key": 1}}, "'text_config': unsupported keys: 'new_key'"),
        ("smolvlm", {"text": {"use_resampler": True}}, "'use_resampler' is True; only False is"),
        ("smolvlm", {"text": {"qk_layer_norms": True}}, "'qk_layer_norms' is True; only False is"),
        ("smolvlm", {"text": {"model_type": "mistral"}}, "'model_type' is 'mistral'; only 'llama'"),
        ("internvl", {"config": {"new_key": 1}}, "unsupported keys: 'new_key'"),
        ("internvl", {"text": {"new_key": 1}}, "'text_config': unsupported keys: 'new_key'"),
        ("internvl", {"text": {"model_type": "gpt_oss"}}, "'gpt_oss'; known: llama, qwen2, qwen3,"),
    ],
)
def test_text_models_that_are_not_understood_are_refused(tmp_path, kind, changes, reason):
    with pytest.raises(ModelLoadError) as raised:
        read(tmp_path, kind, **changes)
    assert reason in str(raised.value)

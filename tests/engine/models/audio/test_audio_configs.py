"""Audio settings in a directory, as models are published and as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.audio.spec import FrameConvSpec
from engine.models.checkpoint import ModelConfig, read_config
from engine.models.families import FAMILIES

_EXTRACTOR = {
    **{"chunk_length": 30, "dither": 0.0, "feature_extractor_type": "WhisperFeatureExtractor"},
    **{"feature_size": 128, "hop_length": 160, "n_fft": 400, "n_samples": 480_000},
    **{"nb_max_frames": 3000, "padding_side": "right", "padding_value": 0.0},
    **{"processor_class": "VoxtralProcessor", "return_attention_mask": False},
    "sampling_rate": 16_000,
}
_VOXTRAL = {
    **{"model_type": "voxtral", "audio_token_id": 24, "projector_hidden_act": "gelu"},
    **{"hidden_size": 3072, "vocab_size": 131_072, "torch_dtype": "bfloat16"},
    "audio_config": {
        **{"activation_dropout": 0.0, "activation_function": "gelu", "attention_dropout": 0.0},
        **{"dropout": 0.0, "head_dim": 64, "hidden_size": 1280, "initializer_range": 0.02},
        **{"intermediate_size": 5120, "layerdrop": 0.0, "max_source_positions": 1500},
        **{"model_type": "voxtral_encoder", "num_attention_heads": 20, "num_hidden_layers": 32},
        **{"num_key_value_heads": 20, "num_mel_bins": 128, "scale_embedding": False},
        "vocab_size": 51_866,
    },
    "text_config": {
        **{"attention_bias": False, "attention_dropout": 0.0, "head_dim": 128},
        **{"hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192},
        **{"max_position_embeddings": 131_072, "mlp_bias": False, "model_type": "llama"},
        **{"num_attention_heads": 32, "num_hidden_layers": 30, "num_key_value_heads": 8},
        **{"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 100_000_000.0},
        **{"sliding_window": None, "use_cache": True, "vocab_size": 131_072},
    },
}
_QWEN2_AUDIO = {
    **{"model_type": "qwen2_audio", "audio_token_index": 151_646, "ignore_index": -100},
    **{"vocab_size": 156_032, "torch_dtype": "bfloat16"},
    "audio_config": {
        **{"model_type": "qwen2_audio_encoder", "num_mel_bins": 128, "encoder_layers": 32},
        **{"encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "encoder_layerdrop": 0.0},
        **{"d_model": 1280, "dropout": 0.0, "attention_dropout": 0.0},
        **{"activation_function": "gelu", "activation_dropout": 0.0, "scale_embedding": False},
        **{"init_std": 0.02, "max_source_positions": 1500},
    },
    "text_config": {
        **{"bos_token_id": 151_643, "eos_token_id": 151_645, "intermediate_size": 11_008},
        **{"max_position_embeddings": 8192, "model_type": "qwen2", "rms_norm_eps": 1e-5},
        **{"rope_theta": 10_000, "torch_dtype": "bfloat16", "use_mrope": False},
        "vocab_size": 156_032,
    },
}


def read(directory: Path, config: dict[str, Any], **extractor: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps({**_EXTRACTOR, **extractor}))
    return read_config(str(directory))


def test_voxtral_as_published(tmp_path: Path) -> None:
    found = read(tmp_path, _VOXTRAL)
    assert found.audio is not None, found.audio_unsupported_reason
    spec, rules = found.audio.spec, found.audio.rules
    assert (spec.joined, spec.window, spec.head_dim, spec.out_size) == (4, 1500, 64, 3072)
    assert isinstance(spec.convolutions, FrameConvSpec)
    assert (rules.token_id, rules.num_tokens(1), rules.num_tokens(480_001)) == (24, 375, 750)
    assert rules.transcription.prompt_for("de") == ("", "lang:de[TRANSCRIBE]")
    assert rules.transcription.prompt_for(None) == ("", "[TRANSCRIBE]")


def test_qwen2_audio_as_published(tmp_path: Path) -> None:
    found = read(tmp_path, _QWEN2_AUDIO)
    assert found.audio is not None, found.audio_unsupported_reason
    rules = found.audio.rules
    assert (rules.num_tokens(480_000), rules.num_tokens(16_000)) == (750, 25)
    assert rules.model_max_samples == 480_000
    assert " in French," in rules.transcription.prompt_for("fr")[0]


def test_defaults_of_qwen3_asr(tmp_path: Path) -> None:
    audio = {"model_type": "qwen3_asr_encoder", "output_dim": 2048}
    config = {"model_type": "qwen3_asr", "audio_config": audio, "text_config": {}}
    extractor = {"min_length": 8000, "n_window": 50}
    found = read(tmp_path, config, **extractor)
    assert found.audio is not None, found.audio_unsupported_reason
    rules, spec = found.audio.rules, found.audio.spec
    assert (spec.window, rules.num_tokens(1), rules.num_tokens(10 * 16_000)) == (104, 7, 130)
    assert rules.transcription.prompt_for("yue") == ("", "language Cantonese<asr_text>")


@pytest.mark.usefixtures("all_keys_matter")
@pytest.mark.parametrize(("changes", "extractor", "words"), [
    ({"magic": 1}, {}, "magic"),
    ({"scale_embedding": True}, {}, "scale_embedding"),
    ({"activation_function": "tanh"}, {}, "activation_function"),
    ({"num_key_value_heads": 4}, {}, "num_key_value_heads"),
    ({"intermediate_size": 5121}, {}, "whole states"),
    ({}, {"hop_length": 100}, "hop_length"),
    ({}, {"feature_size": 80}, "feature_size"),
    ({}, {"chunk_length": 20}, "chunk_length"),
    ({}, {"dither": 0.1}, "dither"),
    ({}, {"magic": 1}, "magic"),
])  # fmt: skip
def test_what_is_not_understood_leaves_the_text_model(
    tmp_path: Path, changes: dict[str, Any], extractor: dict[str, Any], words: str
) -> None:
    config = {**_VOXTRAL, "audio_config": {**_VOXTRAL["audio_config"], **changes}}
    found = read(tmp_path, config, **extractor)
    assert found.audio is None
    assert found.audio_unsupported_reason is not None
    assert words in found.audio_unsupported_reason
    assert found.spec.architecture == "voxtral"


def test_a_token_beyond_the_vocabulary(tmp_path: Path) -> None:
    found = read(tmp_path, {**_VOXTRAL, "audio_token_id": 131_072})
    assert "beyond the vocabulary" in (found.audio_unsupported_reason or "")


def test_families_that_hear_are_among_the_families() -> None:
    from engine.models.audio.families import FAMILIES as HEARING

    assert set(HEARING) <= set(FAMILIES)
    assert all("accepts audio" in FAMILIES[name].differences for name in HEARING)

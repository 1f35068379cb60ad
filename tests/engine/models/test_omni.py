"""Qwen's omni models: our text model equals Hugging Face's thinker, whose images are seen, too."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.models.checkpoint import read_config
from engine.models.spec import DecoderSpec
from tests import tiny_models, tiny_vision, tiny_vision_pixels
from tests.engine.models.test_parity import paged_logits
from tests.engine.models.test_text_parts import save_changed, with_random_weights
from tests.engine.models.vision.test_tower_checkpoints import load, same
from tests.tiny_vision import HEARING

_MROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SEEING = {"depth": 1, "num_heads": 2, "hidden_size": 16, "intermediate_size": 32}
# kind -> (Hugging Face's name, text model's kind, changes to it, vision config)
KINDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_omni": (
        *("Qwen2_5Omni", "qwen2", {"rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2]}}),
        {**_SEEING, "out_hidden_size": 48},
    ),
    "qwen3_omni_moe": (
        *("Qwen3OmniMoe", "qwen3_moe"),
        {
            "moe_intermediate_size": 20,
            "rope_parameters": {
                **{**_MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
                "interleaved": True,
            },
        },
        {**_SEEING, "out_hidden_size": 48, "num_position_embeddings": 16},
    ),
}


def _thinker(kind: str) -> Any:
    name, text_kind, changes, vision = KINDS[kind]
    text = tiny_models.build(text_kind, **changes).config.to_dict()
    del text["model_type"]
    if "num_local_experts" in text:
        text["num_experts"] = text.pop("num_local_experts")
    if "num_position_embeddings" in vision:
        vision = {**vision, "deepstack_visual_indexes": [0]}
    config = getattr(transformers, f"{name}ThinkerConfig")(
        text_config=text, vision_config=vision, audio_config=HEARING, tie_word_embeddings=False
    )
    return with_random_weights(
        getattr(transformers, f"{name}ThinkerForConditionalGeneration"), config
    )


def _with_parts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The thinker's tensors as part of a whole model, with one of what speaks."""
    found = {f"thinker.{name}": tensor for name, tensor in tensors.items()}
    return {**found, "talker.model.norm.weight": torch.ones(4)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_thinker_makes_text(kind, tmp_path):
    expected = save_changed(_thinker(kind), tmp_path, _with_parts)
    own = json.loads((tmp_path / "config.json").read_text())
    own["position_id_per_seconds"], own["seconds_per_chunk"] = 13, 2
    own["text_config"]["eos_token_id"] = None  # as published
    whole = {"model_type": kind, "thinker_config": own, "talker_config": {"hidden_size": 4}}
    whole |= {"enable_audio_output": True, "im_end_token_id": 151645}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    torch.testing.assert_close(paged_logits(tmp_path), expected, atol=1e-4, rtol=0)
    spec = read_config(str(tmp_path)).spec
    assert isinstance(spec, DecoderSpec)
    assert spec.eos_token_ids[0] == 151_645, "which generate() ends texts with"


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_model_sees_with_its_thinker(kind, tmp_path):
    """As it was published, with settings for audio beside those for images."""
    tiny_vision.save(f"{kind}_thinker", tmp_path)
    processor = tiny_vision_pixels.processor(f"{kind}_thinker")
    processor.save_pretrained(tmp_path)
    before = load(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    heard = {"feature_size": 128, "chunk_length": 300, "dither": 0.0, "hop_length": 160}
    heard |= {"n_fft": 400, "n_samples": 4_800_000, "nb_max_frames": 30_000, "padding_value": 0.0}
    heard |= {"padding_side": "right", "return_attention_mask": True, "sampling_rate": 16_000}
    heard["feature_extractor_type"] = "WhisperFeatureExtractor"
    path.write_text(json.dumps({**json.loads(path.read_text()), **heard}))
    own = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": kind, "thinker_config": own, "talker_config": {"hidden_size": 4}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = tmp_path / "model.safetensors"
    save_file(_with_parts(load_file(tensors)), tensors, {"format": "pt"})
    assert read_config(str(tmp_path)).vision is not None
    assert same(load(tmp_path), before)

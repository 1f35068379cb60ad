"""Nemotron's models that see and hear: our text model equals Hugging Face's whole one on text."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
from engine.models.checkpoint import read_config
from engine.models.families import read_spec
from engine.models.spec import DecoderSpec
from tests import tiny_models
from tests.engine.models.test_parity import paged_logits, prompt
from tests.engine.models.test_text_parts import with_random_weights

_SEEING = {
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 16},
    **{"image_size": 32, "video_temporal_patch_size": 2},
}
_HEARING = {
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_mel_bins": 16},
    **{"intermediate_size": 32, "subsampling_conv_channels": 8},
    **{"projection_hidden_size": 16, "projection_bias": False},
}
# Of the published config, beside the sections: in NVIDIA's spelling, and of NVIDIA's code.
_PUBLISHED = {
    **{"force_image_size": 512, "downsample_ratio": 0.5, "patch_size": 16, "use_thumbnail": True},
    **{"img_context_token_id": 18, "img_context_token": "<image>", "img_start_token": "<img>"},
    **{"img_end_token": "</img>", "sound_context_token_id": 27, "vit_hidden_size": 1280},
    **{"sound_context_token": "<so_embedding>", "projector_hidden_size": 20480, "ps_version": "v2"},
    **{"video_context_token_id": 131081, "video_pruning_rate": 0.7, "max_sequence_length": 131072},
    **{"norm_mean": [0.5, 0.5, 0.5], "norm_std": [0.3, 0.3, 0.3], "torch_dtype": "float32"},
    "auto_map": {"AutoModelForCausalLM": "modeling.NemotronH_Nano_Omni_Reasoning_V3"},
    "vision_config": {"version": "radio_v2.5-h"},
    "sound_config": {"model_type": "parakeet"},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory):
    """A whole model's directory, and its logits."""
    text = tiny_models.build("nemotron_h_moe").config.to_dict()
    config = transformers.NemotronH_Omni_Reasoning_V3_Config(
        text_config={**text, "num_nextn_predict_layers": 1},
        vision_config={"model_type": "radio", **_SEEING},
        audio_config=_HEARING,
        vision_hidden_size=16,
        projector_hidden_size=24,
    )
    model: Any = with_random_weights(transformers.NemotronH_Omni_Reasoning_V3, config)
    with torch.no_grad():
        logits = model(torch.tensor([prompt()])).logits[0]
    directory = tmp_path_factory.mktemp("nemotron_omni")
    model.save_pretrained(directory)
    return directory, logits


def test_encoders_are_passed_over(whole):
    directory, expected = whole
    torch.testing.assert_close(paged_logits(directory), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2"])
def test_as_published(whole, model_type, tmp_path):
    """With other names of the sections, a draft layer, and scales of a quantised KV cache."""
    directory, expected = whole
    text = json.loads((directory / "config.json").read_text())["text_config"]
    text["auto_map"] = {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}
    config = {"model_type": model_type, **_PUBLISHED, "llm_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    tensors["mtp.layers.0.norm.weight"] = torch.ones(4)
    tensors["language_model.backbone.layers.2.mixer.k_proj.k_scale"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(paged_logits(tmp_path), expected, atol=2e-4, rtol=0)
    spec = read_config(str(tmp_path)).spec
    assert isinstance(spec, DecoderSpec)
    assert spec.eos_token_ids == (2,)


def test_what_is_not_understood_is_refused(whole):
    directory, _ = whole
    config = json.loads((directory / "config.json").read_text())
    text = config.pop("text_config")
    with pytest.raises(ModelLoadError, match="'text_config' is missing"):
        read_spec(config)
    with pytest.raises(ModelLoadError, match=r"'model_type' is 'llama'; only 'nemotron_h'"):
        read_spec({**config, "text_config": {**text, "model_type": "llama"}})
    named = {**config, "model_type": "NemotronH_Nano_Omni_Reasoning_V3"}
    with pytest.raises(ModelLoadError, match="unsupported keys: 'logit_bias'"):
        read_spec({**named, "text_config": text, "logit_bias": 1})

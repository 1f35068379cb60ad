"""Vision-language models: our text model equals Hugging Face's whole model on text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.models.families import read_spec
from engine.models.spec import DecoderSpec
from tests import tiny_models
from tests.engine.models.test_parity import paged_logits, prompt

_VISION = {
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
    **{"intermediate_size": 64, "patch_size": 14},
}
_LLAMA4_VISION = {
    **{**_VISION, "projector_input_dim": 8, "projector_output_dim": 8, "vision_output_dim": 8}
}
_QWEN_VISION = {
    **{"depth": 1, "num_heads": 2, "hidden_size": 16, "intermediate_size": 32},
    "out_hidden_size": 48,
}
_QWEN3_5_VISION = {**_QWEN_VISION, "num_position_embeddings": 16}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
# model_type -> (Hugging Face class, text model's kind, changes to it, vision config)
PUBLISHED = {
    "llama4": ("Llama4", "llama4", {}, _LLAMA4_VISION),
    "gemma3": ("Gemma3", "gemma3", {}, _VISION),
    "gemma4": ("Gemma4", "gemma4", {}, _VISION),
    "gemma4_shared": ("Gemma4", "gemma4_shared", {}, _VISION),
    "gemma4_unified": ("Gemma4Unified", "gemma4_unified", {}, {}),
    "llava_llama": ("Llava", "llama", {}, {**_VISION, "model_type": "clip_vision_model"}),
    "llava_qwen2": ("Llava", "qwen2", {}, {**_VISION, "model_type": "siglip_vision_model"}),
    "idefics3": ("Idefics3", "llama", {}, _VISION),
    "internvl_llama": ("InternVL", "llama", {}, {**_VISION, "patch_size": 7}),
    "internvl_qwen2": ("InternVL", "qwen2", {}, {**_VISION, "patch_size": 7}),
    "internvl_qwen3": ("InternVL", "qwen3", {}, {**_VISION, "patch_size": 7}),
    "internvl_qwen3_moe": ("InternVL", "qwen3_moe", {}, {**_VISION, "patch_size": 7}),
    "smolvlm": ("SmolVLM", "llama", {}, _VISION),
    "mistral3": ("Mistral3", "mistral", {"head_dim": 16}, {**_VISION, "head_dim": 8}),
    "ministral3": ("Mistral3", "ministral3", {}, {**_VISION, "head_dim": 8}),
    "mistral4": ("Mistral3", "mistral4", {}, {**_VISION, "head_dim": 8}),
    "qwen2_vl": (
        *("Qwen2VL", "qwen2", {"rope_parameters": _MROPE}),
        {"depth": 1, "num_heads": 2, "embed_dim": 16, "hidden_size": 48},
    ),
    "qwen2_5_vl": ("Qwen2_5_VL", "qwen2", {"rope_parameters": _MROPE}, _QWEN_VISION),
    "qwen3_vl": (
        *("Qwen3VL", "qwen3"),
        {"rope_parameters": {**_MROPE, "mrope_section": [4, 2, 2]}},
        {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_vl_moe": (
        *("Qwen3VLMoe", "qwen3_moe"),
        {"moe_intermediate_size": 20, "rope_parameters": {**_MROPE, "mrope_section": [4, 2, 2]}},
        {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
    "exaone4_5": ("Exaone4_5_", "exaone4", {}, {**_QWEN_VISION, "num_key_value_heads": 1}),
    "qwen3_5": ("Qwen3_5", "qwen3_5_text", {}, _QWEN3_5_VISION),
    "qwen3_5_moe": ("Qwen3_5Moe", "qwen3_5_moe_text", {}, _QWEN3_5_VISION),
}


def published(kind):
    """A whole model with random weights."""
    name, text_kind, changes, vision = PUBLISHED[kind]
    text = tiny_models.build(text_kind, **changes).config.to_dict()
    if kind.startswith("qwen"):
        text.pop("model_type")
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=text["tie_word_embeddings"]
    )
    return with_random_weights(getattr(transformers, f"{name}ForConditionalGeneration"), config)


def with_random_weights(model_class: Any, config: Any) -> Any:
    """A model of Hugging Face's, in evaluation mode."""
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).eval()
        for parameter in model.parameters():
            parameter.data.normal_(0.0, 0.25)
    return model


def save_changed(
    model: Any, folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> torch.Tensor:
    """Save the model with other tensors; return its logits of the prompt, [tokens, vocab_size]."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    with torch.no_grad():
        return model(torch.tensor([prompt()])).logits[0]


@pytest.mark.parametrize("kind", PUBLISHED)
def test_the_part_for_images_is_passed_over(tmp_path, kind):
    model = published(kind)
    with torch.no_grad():
        expected = model(torch.tensor([prompt()])).logits[0]
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(paged_logits(tmp_path), expected, atol=1e-4, rtol=0)


def test_text_keys_in_the_config_itself(tmp_path):
    """As Qwen2-VL was published."""
    model = published("qwen2_vl")
    with torch.no_grad():
        expected = model(torch.tensor([prompt()])).logits[0]
    model.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    mrope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    older = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": mrope}
    older |= {"text_config": None, "model_type": "qwen2_vl"}
    tiny_models.edit_config(tmp_path, **{**text, **older})
    torch.testing.assert_close(paged_logits(tmp_path), expected, atol=1e-4, rtol=0)


def test_experts_of_qwen3_vl_as_they_were_published(tmp_path):
    """Inputs first, as transformers itself saved them before version 5."""
    model = published("qwen3_vl_moe")
    with torch.no_grad():
        expected = model(torch.tensor([prompt()])).logits[0]
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if "mlp.experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    torch.testing.assert_close(paged_logits(tmp_path), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("mistral3", "mistral"), ("aya_vision", "cohere2"), ("llama4", "llama4_text")],
)
def test_a_text_section_may_leave_out_what_its_class_says(kind, text):
    """As transformers saved them until about 4.51."""
    sparse = {"model_type": kind, "text_config": {"model_type": text, "num_hidden_layers": 8}}
    config = transformers.CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(sparse)))
    whole = json.loads(config.to_json_string(use_diff=False))
    tied = {"tie_word_embeddings": whole["tie_word_embeddings"]}  # the files decide
    assert read_spec({**sparse, **tied}) == read_spec({**whole, "transformers_version": None})


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_llava_leaves_out_what_its_text_models_class_says(kind):
    config = transformers.LlavaConfig(text_config={"model_type": kind})
    text: Any = config.text_config
    spec = read_spec({"model_type": "llava", "text_config": {"model_type": kind}})
    assert isinstance(spec, DecoderSpec)
    assert spec.hidden_size == text.hidden_size
    assert spec.intermediate_size == text.intermediate_size
    assert spec.num_layers == text.num_hidden_layers
    assert (spec.num_heads, spec.num_kv_heads) == (
        text.num_attention_heads,
        text.num_key_value_heads,
    )
    assert spec.vocab_size == text.vocab_size
    assert spec.max_position_embeddings == text.max_position_embeddings
    assert spec.norm.eps == text.rms_norm_eps
    assert spec.layers[0].window == (4096 if kind == "mistral" else None)
    assert spec.rope is not None
    assert spec.rope.theta == text.rope_parameters["rope_theta"]
    without = {"model_type": kind, "sliding_window": None}
    spec = read_spec({"model_type": "llava", "text_config": without})
    assert isinstance(spec, DecoderSpec)
    assert spec.layers[0].window is None

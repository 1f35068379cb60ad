"""Other names and parts in checkpoints of stateful models."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
from tests import tiny_models
from tests.engine.models.test_parity import paged_logits, prompt

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@pytest.fixture
def checkpoint(tmp_path):
    """(directory, its tensors, Hugging Face's logits for the prompt)."""

    def make(kind: str, **changes):
        model = tiny_models.build(kind, **changes)
        with torch.no_grad():
            logits = model(torch.tensor([prompt()])).logits[0]
        model.save_pretrained(tmp_path)
        return tmp_path, load_file(tmp_path / "model.safetensors"), logits

    return make


def check(directory, tensors, expected) -> None:
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(paged_logits(directory), expected, atol=2e-4, rtol=0)


def test_experts_of_qwen3_5_in_one_tensor_of_a_layer(checkpoint):
    """As Hugging Face stores them."""
    directory, tensors, expected = checkpoint("qwen3_5_moe_text")
    found = {name: match for name in tensors if (match := _EXPERT.fullmatch(name))}
    assert found
    parts: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name, match in sorted(found.items(), key=lambda item: int(item[1][2])):
        layer = parts.setdefault(match[1], {"gate": [], "up": [], "down": []})
        layer[match[3]].append(tensors.pop(name))
    for prefix, own in parts.items():
        pairs = zip(own["gate"], own["up"], strict=True)
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{prefix}.down_proj"] = torch.stack(own["down"])
    check(directory, tensors, expected)


def test_norms_of_olmo_hybrid_by_either_name(checkpoint):
    directory, tensors, expected = checkpoint("olmo_hybrid")
    older = "model.layers.1.feedforward_layer_norm.weight"
    tensors["model.layers.1.post_attention_layernorm.weight"] = tensors[older]
    with pytest.raises(
        ModelLoadError, match=r"has no place in a olmo_hybrid model .* or appears twice"
    ):
        check(directory, tensors, expected)
    del tensors[older]
    check(directory, tensors, expected)
    del tensors["model.layers.1.post_attention_layernorm.weight"]
    with pytest.raises(ModelLoadError, match=r"missing tensors .* 'model.layers.1.feedforward_"):
        check(directory, tensors, expected)


def test_olmo_hybrid_has_values_wider_than_keys(checkpoint):
    """As published. Hugging Face saves three convolutions of equal width; they are resplit."""
    directory, tensors, expected = checkpoint("olmo_hybrid", linear_value_head_dim=16)
    for layer in (0, 2):
        names = [f"model.layers.{layer}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
        whole = torch.cat([tensors[name] for name in names])
        tensors |= zip(names, whole.split([24, 24, 48]), strict=True)
    check(directory, tensors, expected)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text"])
def test_layers_for_multi_token_prediction_are_passed_over(checkpoint, kind):
    directory, tensors, expected = checkpoint(kind)
    tensors["mtp.layers.0.mlp.gate.weight"] = tensors["mtp.norm.weight"] = torch.ones(4)
    check(directory, tensors, expected)

"""Text models within models that see: exporters differ in where their tensors lie."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny_models
from tests.engine.models.test_parity import paged_logits, prompt
from tests.engine.models.test_text_parts import published, save_changed


def _modules_name(name: str) -> str:
    """The name of a tensor's module in transformers since 4.52, for a published one."""
    for old, new in (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        *(
            (part, f"model.{part}")
            for part in ("visual.", "vision_tower.", "multi_modal_projector.")
        ),
    ):
        if name.startswith(old):
            return new + name.removeprefix(old)
    if name.startswith(("model.layers.", "model.embed_tokens.", "model.norm.")):
        return "model.language_model." + name.removeprefix("model.")
    return name


@pytest.mark.parametrize(
    "kind", ["gemma3", "mistral3", "llava_llama", "internvl_qwen3", "qwen2_vl", "qwen2_5_vl"]
)
def test_names_of_modules_as_tools_save_them(kind, tmp_path):
    model = published(kind)

    def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {_modules_name(name): tensor for name, tensor in tensors.items()}
        assert found.keys() <= model.state_dict().keys()
        return found

    expected = save_changed(model, tmp_path, renamed)
    torch.testing.assert_close(paged_logits(tmp_path), expected, atol=1e-4, rtol=0)


def test_ling_as_published(tmp_path):
    """Its delta rules have ``o_proj`` where Hugging Face saves ``dense``, as attention has."""

    def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        deltas = {name.removesuffix("b_proj.weight") for name in tensors if "b_proj" in name}
        new = {f"{own}dense.weight": f"{own}o_proj.weight" for own in deltas}
        found = {new.get(name, name): tensor for name, tensor in tensors.items()}
        assert sum("attention.o_proj" in name for name in found) == 2
        assert sum("attention.dense" in name for name in found) == 1
        return found

    expected = save_changed(tiny_models.build("bailing_hybrid"), tmp_path, renamed)
    torch.testing.assert_close(paged_logits(tmp_path), expected, atol=1e-4, rtol=0)


def _add_buffers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add what belongs to no parameter: old buffers, and calibrated scales of a KV cache."""
    found = dict(tensors)
    for name in tensors:
        attention, mark, _ = name.rpartition("q_proj.weight")
        if mark and "vision" not in name and "visual" not in name:
            found[f"{attention}rotary_emb.inv_freq"] = torch.ones(4)
            found[f"{attention}k_proj.k_scale"] = torch.tensor(0.25)
            found[f"{attention}v_proj.v_scale"] = torch.tensor(0.5)
            found[f"{attention}k_scale"] = torch.tensor(0.5)
    return found


@pytest.mark.parametrize("kind", ["mistral3", "qwen3_vl"])
def test_buffers_and_scales_of_the_cache_are_passed_over_there_too(kind, tmp_path):
    expected = save_changed(published(kind), tmp_path, _add_buffers)
    saved = load_file(tmp_path / "model.safetensors")
    assert any(name.endswith("k_proj.k_scale") for name in saved)
    torch.testing.assert_close(paged_logits(tmp_path), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["gemma4_moe", "llama4"])
def test_stacked_experts_one_by_one(kind, tmp_path):
    """As GPTQModel and llm-compressor save them, which quantise matrices."""
    model = tiny_models.build(kind)
    with torch.no_grad():
        expected = model(torch.tensor([prompt()])).logits[0]
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        stem, _, which = name.rpartition(".")
        stacked = tensors.pop(name)
        for e, expert in enumerate(stacked.mT if kind == "llama4" else stacked):
            parts = expert.chunk(2) if which == "gate_up_proj" else (expert,)
            names = ("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",)
            for part, own in zip(names, parts, strict=True):
                tensors[f"{stem}.{e}.{part}.weight"] = own.contiguous()
    assert any(name.endswith("experts.0.gate_proj.weight") for name in tensors)
    save_file(tensors, file, {"format": "pt"})
    torch.testing.assert_close(paged_logits(tmp_path), expected, atol=1e-4, rtol=0)

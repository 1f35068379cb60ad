"""Parameters that some checkpoints of a family lack, and others have: the files decide."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
from engine.models.checkpoint import read_config
from tests import tiny_models
from tests.engine.handmade import load
from tests.engine.models.test_parity import paged_logits, prompt


def drop(directory: Path, ends: str, keep: str = "") -> None:
    """Remove tensors from a saved model."""
    path = directory / "model.safetensors"
    held = load_file(path)
    left = {name: x for name, x in held.items() if name == keep or not name.endswith(ends)}
    assert len(left) < len(held)
    save_file(left, path, metadata={"format": "pt"})


def neutral_twin(kind: str, directory: Path, ends: str) -> torch.Tensor:
    """Save a twin whose parameters with these names are zeros; return Hugging Face's logits."""
    model = tiny_models.build(kind)
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(ends):
            x.data.zero_()
    with torch.no_grad():
        logits = model(torch.tensor([prompt()])).logits[0]
    model.save_pretrained(directory)
    return logits


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        *(("stablelm", "norm.bias"), ("stablelm_heads", "norm.bias")),
        ("axk1", "e_score_correction_bias"),
    ],
)
def test_files_without_them_are_as_those_with_neutral_ones(kind, ends, tmp_path):
    """As published, where Hugging Face's own code would save them."""
    expected = neutral_twin(kind, tmp_path, ends)
    drop(tmp_path, ends)
    torch.testing.assert_close(paged_logits(tmp_path), expected, atol=1e-4, rtol=0)


def test_the_files_decide_and_not_the_config(tmp_path):
    """A model tuned with Hugging Face's code has biases, and the config it was published with."""
    tiny_models.save("stablelm_heads", tmp_path)
    tiny_models.edit_config(tmp_path, use_norm_bias=False)
    assert read_config(str(tmp_path)).spec.norm.bias


def test_files_with_some_of_them_are_refused(tmp_path):
    tiny_models.save("stablelm", tmp_path)
    drop(tmp_path, "norm.bias", keep="model.norm.bias")
    with pytest.raises(ModelLoadError, match="missing tensors"):
        load(tmp_path)


def test_a_norm_that_its_layer_does_not_use_is_left_out(tmp_path):
    """A.X K1's files have one after each MLP; without experts nothing is normed."""
    expected = neutral_twin("axk1", tmp_path, "e_score_correction_bias")
    path = tmp_path / "model.safetensors"
    held = load_file(path)
    left = held["model.layers.1.post_mlp_layernorm.weight"].clone()
    held["model.layers.0.post_mlp_layernorm.weight"] = left
    save_file(held, path, metadata={"format": "pt"})
    torch.testing.assert_close(paged_logits(tmp_path), expected, atol=1e-4, rtol=0)


def test_published_config_of_stablelm_2_12b(tmp_path):
    """Without code of its own, and as first published."""
    tiny_models.save("stablelm_heads", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"use_norm_bias": False, "rotary_scaling_factor": 1.0, "hidden_dropout": 0.0}
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_stablelm.StableLmForCausalLM"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(str(tmp_path)).spec.qk_layer_norm

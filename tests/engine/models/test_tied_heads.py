"""Heads that a config calls tied to the embedding: the files decide whether they are."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.models.checkpoint import read_config
from engine.models.safetensors import are_equal, read_header
from engine.models.spec import DecoderSpec
from tests import tiny_models
from tests.engine.models.test_parity import paged_logits, prompt


def _logits(directory) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([prompt()])).logits[0]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_head_unlike_the_embedding_is_used(kind, tmp_path, caplog):
    """As tuning both and saving the old config leaves them."""
    tiny_models.save(kind, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    head[3:5] += 0.5
    save_file({**tensors, "lm_head.weight": head}, file, {"format": "pt"})
    tiny_models.edit_config(tmp_path, tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING):
        found = paged_logits(tmp_path)
    torch.testing.assert_close(found, _logits(tmp_path), atol=1e-4, rtol=0)
    assert "'lm_head.weight' differs from the embedding" in caplog.text


def test_a_copy_of_the_embedding_is_not_held_twice(tmp_path):
    tiny_models.save("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    copy = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": copy}, file, {"format": "pt"})
    tiny_models.edit_config(tmp_path, tie_word_embeddings=True)
    spec = read_config(str(tmp_path)).spec
    assert isinstance(spec, DecoderSpec)
    assert spec.tie_word_embeddings
    torch.testing.assert_close(paged_logits(tmp_path), _logits(tmp_path), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(3, 5), (64, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_compared_by_their_numbers(shape, dtype, tmp_path):
    """Whatever their size in bytes; and what is not a number is the same as its copy."""
    own = torch.randn(shape).to(dtype)
    own[0, 0], own[1, 1] = 0.0, float("nan")
    signed, other = own.clone(), own.clone()
    signed[0, 0], other[-1, -1] = -0.0, 9.0
    file = tmp_path / "model.safetensors"
    save_file({"own": own, "copy": own.clone(), "signed": signed, "other": other}, file)
    header = read_header(file)
    entries = {name: (header, entry) for name, entry in header.entries.items()}
    assert are_equal(entries["own"], entries["copy"])
    assert not are_equal(entries["own"], entries["other"])
    own[1, 1] = signed[1, 1] = 1.0
    save_file({"own": own, "signed": signed}, file)
    header = read_header(file)
    assert are_equal((header, header.entries["own"]), (header, header.entries["signed"]))

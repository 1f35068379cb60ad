"""Quantised checkpoints and GGUF files on several ranks: the codes are those of the files."""

from __future__ import annotations

import gguf
import pytest
import torch

from engine.errors import ModelLoadError
from tests import gguf_files, tiny_models
from tests.engine.handmade import load
from tests.engine.parallel.test_shared_logits import logits_of, prompt, shared_logits
from tests.engine.quantization.test_formats import FORMATS, _write


@pytest.fixture
def widened(monkeypatch):
    """Compute in float32: native kernels, which compute in bfloat16, are disabled."""
    monkeypatch.setattr("kernels.cpu.linear.is_available", lambda: False)


# Groups of inputs that end where ranks' inputs do, or one group for all of them.
SHARED_FORMATS = sorted(FORMATS.keys() - {"gptq4_act", "w4a16_act", "fp8_block"})
QUICK = ("awq", "w8a8", "nf4")
FORMAT_SHAPE = {"hidden_size": 128, "intermediate_size": 256}


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize(
    "written",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in SHARED_FORMATS
    ],
)
def test_codes_are_shared_out_as_they_are(tmp_path, written):
    directory, expected = _write("llama", written, tmp_path, **FORMAT_SHAPE)
    torch.testing.assert_close(shared_logits(directory, 2), expected, atol=1e-4, rtol=0)


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize(("kind", "written"), [("phi3", "w8a8"), ("mixtral", "w8a8")])
def test_codes_of_fused_projections_and_experts(tmp_path, kind, written):
    directory, expected = _write(kind, written, tmp_path, **FORMAT_SHAPE)
    torch.testing.assert_close(shared_logits(directory, 2), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("written", "problem"),
    [("gptq4_act", "act-order"), ("fp8_block", "inputs 0 to 64 do not begin and end with groups")],
)
def test_groups_that_ranks_would_cut_in_two_are_named(tmp_path, written, problem):
    directory, _ = _write("llama", written, tmp_path, expect=False, **FORMAT_SHAPE)
    with pytest.raises(ModelLoadError, match=r"o_proj.* cannot be shared out to ranks") as caught:
        load(directory, tensor_parallel_size=2)
    assert problem in str(caught.value)


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize("kind", ["qwen2_moe", "gpt2"])
def test_gguf_files_are_shared_out(tmp_path, kind):
    model = tiny_models.build(kind, **({"mlp_only_layers": []} if kind == "qwen2_moe" else {}))
    with torch.no_grad():
        expected = model(torch.tensor([prompt()])).logits[0]
    path = gguf_files.write(tmp_path / "model.gguf", model)
    torch.testing.assert_close(shared_logits(path, 2), expected, atol=1e-4, rtol=0)


def test_codes_of_gguf_files_are_shared_out(tmp_path):
    model = tiny_models.build("llama", **FORMAT_SHAPE, num_attention_heads=4)
    encode = gguf_files.as_type(gguf.GGMLQuantizationType.Q4_0)
    path = gguf_files.write(tmp_path / "model.gguf", model, encode)
    exact, alone = logits_of(load(path)), logits_of(load(path, dtype="bfloat16"))
    shared = shared_logits(path, 2, dtype="bfloat16")
    assert (shared - exact).norm() < 1.5 * (alone - exact).norm()

"""Experts in codes, all of a layer as one: what a GPU holds, computed by its kernels' twins."""

from __future__ import annotations

import pytest
import torch

from engine.quantization import choose
from engine.runner import load as load_module
from kernels.tiled import TiledWeight
from tests import tiny_models
from tests.engine.models.test_parity import paged_logits
from tests.engine.quantization.test_formats import _SHAPE, _write


@pytest.fixture
def widened(monkeypatch):
    """In float32, to the last bits: without native kernels, which compute in bfloat16."""
    monkeypatch.setattr("kernels.cpu.linear.is_available", lambda: False)


@pytest.fixture
def stacked(monkeypatch):
    """As a GPU computes experts: all of a layer as one product, whose twin runs here. Gives what is
    made."""
    made, make = [], load_module.make_modules

    def make_stacked(*args, **_):
        made.append(make(*args, stacked=True))
        return made[-1]

    monkeypatch.setattr(load_module, "make_modules", make_stacked)
    monkeypatch.setattr(choose, "_refuse_triton", lambda *_, **__: None)
    return made


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize(
    ("kind", "written"),
    [
        ("mixtral", "gptq4"),
        ("mixtral", "nvfp4"),
    ],
)
def test_experts_of_one_product_stay_in_codes(kind, written, tmp_path, caplog, stacked):
    """Within what scales lose in sixteen bits: an eighth of what bfloat16 makes of so small a model
    (``test_formats.py``)."""
    directory, expected = _write(kind, written, tmp_path)
    error = paged_logits(directory) - expected
    assert float(error.norm() / expected.norm()) < 0.01
    for layer in stacked[0].layers:
        for part in layer.mlp.stacked[:2]:
            assert isinstance(part, TiledWeight)
            assert part.nbytes < part.num_matrices * part.outputs * part.inputs * 1.2
    assert "experts are held in" not in caplog.text


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_of_one_product_are_rounded_at_load(quantization, tmp_path, request):
    """To the same codes as those that are layers of their own."""
    directory = tiny_models.save("qwen3_moe", tmp_path, **_SHAPE)
    expected = paged_logits(directory, quantization=quantization)
    stacked = request.getfixturevalue("stacked")
    logits = paged_logits(directory, quantization=quantization)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
    paged_logits(directory)
    rounded, dense = (made.layers[0].mlp.num_bytes for made in stacked)
    assert rounded < 0.4 * dense  # of float32, and the router stays as it is


@pytest.mark.usefixtures("widened", "stacked")
@pytest.mark.parametrize(
    ("written", "reason", "told"),
    [
        ("gptq8", "the GPU is too old", "the GPU is too old"),
        ("gptq4_act", None, "not in the same codes"),  # gate and up, each in an order of its own
    ],
)
def test_experts_that_no_kernel_multiplies_are_widened_and_told(
    written, reason, told, tmp_path, caplog, monkeypatch
):
    directory, expected = _write("mixtral", written, tmp_path)
    monkeypatch.setattr(choose, "_refuse_triton", lambda *_, **__: reason)
    torch.testing.assert_close(paged_logits(directory), expected, atol=1e-4, rtol=0)
    assert "experts are held in torch.float32, not as codes" in caplog.text
    assert told in caplog.text

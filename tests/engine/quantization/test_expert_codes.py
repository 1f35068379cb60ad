"""Experts in codes, one product per layer as on a GPU, computed by the reference kernels."""

from __future__ import annotations

import pytest
import torch

from engine.quantization import selection
from engine.runner import load as load_module
from kernels.tiled import TiledWeight
from tests import tiny_models
from tests.engine.models.test_parity import paged_logits
from tests.engine.quantization.test_formats import _SHAPE, _write


@pytest.fixture
def widened(monkeypatch):
    """Compute in float32: native kernels, which compute in bfloat16, are disabled."""
    monkeypatch.setattr("kernels.cpu.linear.is_available", lambda: False)


@pytest.fixture
def stacked(monkeypatch):
    """Compute experts as a GPU does, one product per layer, with the reference kernels.

    Returns the layers that are created.
    """
    made, make = [], load_module.make_modules

    def make_stacked(*args, **_):
        made.append(make(*args, stacked=True))
        return made[-1]

    monkeypatch.setattr(load_module, "make_modules", make_stacked)
    monkeypatch.setattr(selection, "_triton_unsupported_reason", lambda *_, **__: None)
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
    """The error is that of sixteen-bit scales: an eighth of bfloat16's on so small a model.

    See ``test_formats.py``.
    """
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
    """To the same codes as experts that are separate layers."""
    directory = tiny_models.save("qwen3_moe", tmp_path, **_SHAPE)
    expected = paged_logits(directory, quantization=quantization)
    stacked = request.getfixturevalue("stacked")
    logits = paged_logits(directory, quantization=quantization)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
    paged_logits(directory)
    rounded, dense = (made.layers[0].mlp.num_bytes for made in stacked)
    assert rounded < 0.4 * dense  # of float32, and the router is not rounded


@pytest.mark.usefixtures("widened", "stacked")
@pytest.mark.parametrize(
    ("written", "reason", "told"),
    [
        ("gptq8", "the GPU is too old", "the GPU is too old"),
        ("gptq4_act", None, "not in the same codes"),  # gate and up have separate orders
    ],
)
def test_experts_that_no_kernel_multiplies_are_widened_and_told(
    written, reason, told, tmp_path, caplog, monkeypatch
):
    directory, expected = _write("mixtral", written, tmp_path)
    monkeypatch.setattr(selection, "_triton_unsupported_reason", lambda *_, **__: reason)
    torch.testing.assert_close(paged_logits(directory), expected, atol=1e-4, rtol=0)
    assert "experts are held in torch.float32, not as codes" in caplog.text
    assert told in caplog.text

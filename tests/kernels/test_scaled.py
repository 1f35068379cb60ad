"""Float8 products equal those of the rounded activations and weights."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from engine.quantization import gpu
from engine.quantization.gpu import TritonPacked
from kernels.packed import PackedWeight
from kernels.reference.quantised import quantise_fp8
from kernels.scaled import quantise_rows, scaled_linear, scaled_unsupported_reason

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_rows_are_rounded_to_all_of_the_range(size: float) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) * size
    x[2] = 0.0
    codes, scales = quantise_rows(x)
    assert codes.dtype == torch.float8_e4m3fn
    assert not codes.float().isnan().any()
    kept = x.abs().amax(1) > 1e-20  # smaller values become zero
    assert torch.equal(codes.float().abs().amax(1)[kept], torch.full((int(kept.sum()),), 448.0))
    error = codes.double() * scales.double() - x.double()
    # Half of the last of three mantissa bits, and half of the smallest step.
    bound = x.double().abs() * 2**-4 + scales.double() * 2**-10 * 1.01
    assert bool((error.abs() <= bound)[kept].all())


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_the_codes(has_bias: bool) -> None:
    random = torch.Generator().manual_seed(2)
    x = (torch.randn(40, 64, generator=random) * torch.logspace(-3, 3, 40)[:, None]).to(BF16)
    weight = quantise_fp8(torch.randn(48, 64, generator=random))
    bias = torch.randn(48, generator=random).to(BF16) if has_bias else None
    codes, steps = quantise_rows(x)
    expected = (codes.double() * steps) @ weight.dequantise(torch.float64).T
    if bias is not None:
        expected += bias.double()
    made = scaled_linear(x, weight.codes, weight.scales, bias)
    assert made.dtype == BF16
    assert max(relative(*rows) for rows in zip(made, expected, strict=True)) < 5e-3


def test_what_is_refused() -> None:
    assert scaled_unsupported_reason(48, 64, BF16, CPU) is None
    assert "multiples of 16" in str(scaled_unsupported_reason(40, 64, BF16, CPU))
    assert "multiples of 16" in str(scaled_unsupported_reason(48, 72, BF16, CPU))
    assert "bfloat16" in str(scaled_unsupported_reason(48, 64, torch.float16, CPU))


@pytest.mark.parametrize(("capability", "is_refused"), [((8, 9), True), ((9, 0), False)])
def test_a_gpu_must_be_new_enough(monkeypatch, capability, is_refused) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert (scaled_unsupported_reason(48, 64, BF16, torch.device("cuda")) is not None) == is_refused


def test_rows_of_a_layer_are_multiplied_so_where_the_format_means_it(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "packed_linear", lambda *_: "widened")
    monkeypatch.setattr(gpu, "scaled_linear", lambda *_: "scaled")
    weight = quantise_fp8(torch.randn(48, 64))
    blocks = PackedWeight(
        weight.codes, weight.scales.expand(-1, 2), 64, 32, has_quantised_activations=True
    )
    monkeypatch.setattr(gpu, "skinny_packed_linear", lambda *_: "read once")
    one, many = torch.zeros(1, 64, dtype=BF16), torch.zeros(2, 64, dtype=BF16)
    for held, made in (
        (weight.with_quantised_activations(), "scaled"),
        (weight, "widened"),
        (blocks, "widened"),
    ):
        layer = TritonPacked(held, None, BF16, in_float8=True)
        assert TritonPacked(held, None, BF16)(many) == "widened"  # where it failed its check
        assert layer(one) == "read once"
        assert layer(many) == made

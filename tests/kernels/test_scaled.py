"""Products of codes equal those of the rounded activations and weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from engine.quantization import gpu
from engine.quantization.gpu import TritonPacked
from kernels import scaled
from kernels.packed import PackedWeight
from kernels.reference.quantised import quantise_fp8, quantise_int8
from kernels.scaled import (
    LARGEST_CODES,
    MAX_UNROUNDED_ROWS,
    quantise_rows,
    scaled_linear,
    scaled_unsupported_reason,
)
from tests.kernels.row_scales import cpu_takes_row_scales

CPU, BF16 = torch.device("cpu"), torch.bfloat16
FLOAT8, INT8 = torch.float8_e4m3fn, torch.int8


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [FLOAT8, INT8])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_rows_are_rounded_to_all_of_the_range(size: float, dtype: torch.dtype) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) * size
    x[2] = 0.0
    codes, scales = quantise_rows(x, dtype)
    assert codes.dtype == dtype
    assert not codes.float().isnan().any()
    kept = x.abs().amax(1) > 1e-20  # smaller values become zero
    largest = codes.float().abs().amax(1)[kept]
    assert torch.equal(largest, torch.full_like(largest, LARGEST_CODES[dtype]))
    error = codes.double() * scales.double() - x.double()
    bound = scales.double() * 0.501
    if dtype == FLOAT8:
        # Half of the last of three mantissa bits, and half of the smallest step.
        bound = x.double().abs() * 2**-4 + scales.double() * 2**-10 * 1.01
    assert bool((error.abs() <= bound)[kept].all())


@pytest.mark.parametrize("round_to", [quantise_fp8, quantise_int8])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_the_codes(monkeypatch, has_bias: bool, round_to) -> None:
    """Sums of integers are bounded in memory: here two parts."""
    if round_to is quantise_fp8 and not cpu_takes_row_scales():
        pytest.skip("this torch has float8 products with row scales on GPUs only")
    monkeypatch.setattr(scaled, "_MAX_SUMS_BYTES", 39 * 48 * 4)
    random = torch.Generator().manual_seed(2)
    x = (torch.randn(40, 64, generator=random) * torch.logspace(-3, 3, 40)[:, None]).to(BF16)
    weight = round_to(torch.randn(48, 64, generator=random))
    bias = torch.randn(48, generator=random).to(BF16) if has_bias else None
    codes, steps = quantise_rows(x, weight.codes.dtype)
    expected = (codes.double() * steps) @ weight.dequantise(torch.float64).T
    if bias is not None:
        expected += bias.double()
    made = scaled_linear(x, weight.codes, weight.scales, bias)
    assert made.dtype == BF16
    assert max(relative(*rows) for rows in zip(made, expected, strict=True)) < 5e-3


def test_what_is_refused() -> None:
    assert scaled_unsupported_reason(FLOAT8, 48, 64, BF16, CPU) is None
    assert "multiples of 16" in str(scaled_unsupported_reason(FLOAT8, 40, 64, BF16, CPU))
    assert "multiples of 16" in str(scaled_unsupported_reason(INT8, 48, 72, BF16, CPU))
    assert "bfloat16" in str(scaled_unsupported_reason(FLOAT8, 48, 64, torch.float16, CPU))
    assert scaled_unsupported_reason(INT8, 48, 64, torch.float16, CPU) is None
    assert "uint8" in str(scaled_unsupported_reason(torch.uint8, 48, 64, BF16, CPU))


@pytest.mark.parametrize(("capability", "is_refused"), [((8, 9), True), ((9, 0), False)])
def test_a_gpu_must_be_new_enough(monkeypatch, capability, is_refused) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    gpu_device = torch.device("cuda")
    reason = scaled_unsupported_reason(FLOAT8, 48, 64, BF16, gpu_device)
    assert (reason is not None) == is_refused
    assert scaled_unsupported_reason(INT8, 48, 64, BF16, gpu_device) is None


@pytest.mark.parametrize("round_to", [quantise_fp8, quantise_int8])
def test_rows_of_a_layer_are_multiplied_so_where_the_format_means_it(monkeypatch, round_to) -> None:
    monkeypatch.setattr(gpu, "packed_linear", lambda *_: "widened")
    monkeypatch.setattr(gpu, "scaled_linear", lambda *_: "scaled")
    weight = round_to(torch.randn(48, 64))
    blocks = PackedWeight(
        weight.codes, weight.scales.expand(-1, 2), 64, 32, has_quantised_activations=True
    )
    monkeypatch.setattr(gpu, "skinny_packed_linear", lambda *_: "read once")
    one, few, many = (
        torch.zeros(rows, 64, dtype=BF16)
        for rows in (1, MAX_UNROUNDED_ROWS, MAX_UNROUNDED_ROWS + 1)
    )
    for held, made in (
        (weight, "scaled"),
        (replace(weight, has_quantised_activations=False), "widened"),
        (blocks, "widened"),
    ):
        layer = TritonPacked(held, None, BF16, refuse_scaled=lambda _: None)
        assert layer(one) == "read once"
        assert layer(few) == "widened"
        assert layer(many) == made
        failed = TritonPacked(held, None, BF16, refuse_scaled=lambda codes: f"{codes} are wrong")
        assert failed(many) == "widened"

"""Activations are rounded, and sums of integers scaled, as the reference does."""

from __future__ import annotations

import pytest
import torch

from kernels.scaled import quantise_rows as reference
from kernels.scaled import rescale as reference_rescale
from kernels.triton import scaled
from kernels.triton.scaled import quantise_rows, rescale


@pytest.mark.parametrize("inputs", [16, 80, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_rows_have_the_same_codes(
    monkeypatch, inputs: int, dtype: torch.dtype, kind: torch.dtype
) -> None:
    """In one tile and in several; of all sizes, nothing, and a wider tensor."""
    monkeypatch.setattr(scaled, "_TILE", 128)
    random = torch.Generator().manual_seed(inputs)
    wide = torch.full((7, inputs + 16), float("nan"), dtype=dtype)
    x = wide[:, :inputs]
    x.copy_(torch.randn(7, inputs, generator=random) * torch.logspace(-6, 4, 7)[:, None])
    x[3] = 0.0
    codes, scales = quantise_rows(x, kind)
    expected, steps = reference(x, kind)
    assert codes.dtype == kind
    assert torch.equal(scales, steps)
    assert torch.equal(codes.float(), expected.float())


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # the code may be any
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_a_row_with_what_is_no_number_is_none(monkeypatch, kind: torch.dtype) -> None:
    """Its request has to fail, and nobody else's."""
    monkeypatch.setattr(scaled, "_TILE", 128)
    x = torch.randn(3, 300)
    x[1, 200] = float("nan")
    codes, scales = quantise_rows(x, kind)
    made = codes.float() * scales
    assert made[1].isnan().all()
    assert made[[0, 2]].isfinite().all()
    expected = reference(x, kind)[1]
    torch.testing.assert_close(scales, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("has_bias", [False, True])
def test_sums_of_integers_are_scaled(monkeypatch, has_bias: bool) -> None:
    monkeypatch.setattr(scaled, "_SCALED_COLUMNS", 16)
    random = torch.Generator().manual_seed(3)
    sums = torch.randint(-(2**24), 2**24, (5, 40), generator=random, dtype=torch.int32)
    steps, scales = torch.rand(5, 1, generator=random), torch.rand(40, 1, generator=random)
    bias = torch.randn(40, generator=random).half() if has_bias else None
    made, expected = torch.full((2, 5, 40), float("nan")).unbind()
    rescale(sums, steps, scales, bias, made)
    reference_rescale(sums, steps, scales, bias, expected)
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-3)

"""Activations are rounded to float8 as the reference rounds them."""

from __future__ import annotations

import pytest
import torch

from kernels.scaled import quantise_rows as reference
from kernels.triton import scaled
from kernels.triton.scaled import quantise_rows


@pytest.mark.parametrize("inputs", [16, 80, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_have_the_same_codes(monkeypatch, inputs: int, dtype: torch.dtype) -> None:
    """In one tile and in several; of all sizes, nothing, and a wider tensor."""
    monkeypatch.setattr(scaled, "_TILE", 128)
    random = torch.Generator().manual_seed(inputs)
    wide = torch.full((7, inputs + 16), float("nan"), dtype=dtype)
    x = wide[:, :inputs]
    x.copy_(torch.randn(7, inputs, generator=random) * torch.logspace(-6, 4, 7)[:, None])
    x[3] = 0.0
    codes, scales = quantise_rows(x)
    expected, steps = reference(x)
    assert codes.dtype == torch.float8_e4m3fn
    assert torch.equal(scales, steps)
    assert torch.equal(codes.float(), expected.float())

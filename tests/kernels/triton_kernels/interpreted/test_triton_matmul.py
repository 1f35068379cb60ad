"""Matrix products: right, and with the same bits for a row alone, in a batch and at any place."""

from __future__ import annotations

import pytest
import torch

from kernels.reference.matmul import invariant_heads as reference_heads
from kernels.reference.matmul import invariant_linear as reference_linear
from kernels.triton import matmul
from kernels.triton.matmul import invariant_heads, invariant_linear

FEW_PROGRAMS = [132, 1]  # with few, tiles are wide


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "has_bias"),
    [(1, 64, 128, False), (3, 100, 70, True), (130, 192, 300, True), (1100, 33, 5, False)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("few_programs", FEW_PROGRAMS)
def test_products_equal_the_twins(
    few_programs: int,
    rows: int,
    inputs: int,
    outputs: int,
    has_bias: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matmul, "_FEW_PROGRAMS", few_programs)
    random = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, inputs, generator=random).to(dtype) for n in (rows, outputs))
    bias = torch.randn(outputs, generator=random).to(dtype) if has_bias else None
    # Rows of a wider tensor, like a slice of a fused projection.
    wide = torch.cat((x, torch.full_like(x, float("nan"))), dim=1)[:, :inputs]
    expected = reference_linear(x, weight, bias)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    for given in (x, wide):
        torch.testing.assert_close(
            invariant_linear(given, weight, bias), expected, rtol=tolerance, atol=tolerance
        )


@pytest.mark.usefixtures("matrix_units")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("few_programs", [*FEW_PROGRAMS, 2])
def test_a_row_has_the_same_bits_in_any_batch(
    few_programs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches below, at and above the height of a tile, with rows at different places."""
    monkeypatch.setattr(matmul, "_FEW_PROGRAMS", few_programs)
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 320, generator=random).to(dtype) for n in (200, 150))
    whole = invariant_linear(x, weight)
    for begin, end in ((0, 1), (37, 38), (3, 67), (64, 129), (100, 200)):
        assert torch.equal(invariant_linear(x[begin:end], weight), whole[begin:end])


@pytest.mark.usefixtures("matrix_units")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_of_heads(dtype: torch.dtype) -> None:
    """Equal to the reference, and with the same bits for a token in any batch."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(90, 3, 56, generator=random).to(dtype)
    weight = torch.randn(3, 70, 40, generator=random).to(dtype)
    whole = invariant_heads(x, weight, 16)
    torch.testing.assert_close(whole, reference_heads(x, weight, 16), rtol=2e-3, atol=1e-2)
    assert torch.equal(whole[..., 70:], x[..., 40:])
    for begin, end in ((0, 1), (7, 50)):
        assert torch.equal(invariant_heads(x[begin:end], weight, 16), whole[begin:end])

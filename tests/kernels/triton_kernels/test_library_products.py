"""Products by the library keep a row's bits, whatever it does with some numbers of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from kernels.triton.library import TRIED_ROWS, LibraryProducts, WriteProduct

INPUTS, OUTPUTS = 32, 20
Bias = torch.Tensor | None


def ours(x: torch.Tensor, weight: torch.Tensor, bias: Bias) -> torch.Tensor:
    """One accumulator for an element, in one order."""
    total = torch.zeros(x.shape[0], weight.shape[0])
    for inputs, factors in zip(x.float().unbind(1), weight.float().unbind(1), strict=True):
        total += inputs[:, None] * factors
    return (total if bias is None else total + bias.float()).to(x.dtype)


def split(x: torch.Tensor, weight: torch.Tensor, bias: Bias) -> torch.Tensor:
    """Two accumulators, which are then added: other bits."""
    half = INPUTS // 2
    first = ours(x[:, :half].float(), weight[:, :half].float(), None)
    second = ours(x[:, half:].float(), weight[:, half:].float(), bias)
    return (first + second).to(x.dtype)


def library(splits: Callable[[int], bool], calls: list[int]) -> WriteProduct:
    """Writes the numbers of rows into ``calls``; splits inputs for some of them."""

    def write(x: torch.Tensor, weight: torch.Tensor, bias: Bias, output: torch.Tensor) -> None:
        calls.append(x.shape[0])
        if x.shape[0] == 13:
            raise RuntimeError("not enough memory")
        output.copy_((split if splits(x.shape[0]) else ours)(x, weight, bias))

    return write


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy at an address as a GPU's allocator would give it."""
    memory = torch.empty(tensor.nbytes + 512, dtype=torch.uint8)
    begin = -memory.data_ptr() % 512
    copy = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def problem(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, INPUTS, generator=random) * torch.logspace(-2, 1, INPUTS)
    weight = torch.randn(OUTPUTS, INPUTS, generator=random)
    bias = torch.randn(OUTPUTS, generator=random)
    return aligned(x.bfloat16()), aligned(weight.bfloat16()), bias.bfloat16()


def test_only_numbers_of_rows_with_our_bits_are_proven() -> None:
    _, weight, bias = problem(1)
    calls: list[int] = []
    products = LibraryProducts(ours, library(lambda rows: rows in (8, 64), calls))
    for added in (None, bias):
        assert products.prove(weight, added, (64, 32, 16, 13, 8)) == (32, 16)
    assert set(calls) == {64, 32, 16, 13, 8}
    # Zeros are the same in any order.
    assert products.prove(torch.zeros_like(weight), None, (16,)) == ()


@settings(deadline=None)
@given(rows=st.integers(0, 150), begin=st.integers(0, 149), length=st.integers(1, 60))
def test_a_row_has_our_bits_wherever_it_lies(rows: int, begin: int, length: int) -> None:
    x, weight, bias = problem(rows)
    calls: list[int] = []
    products, sizes = LibraryProducts(ours, library(lambda rows: False, calls)), (64, 16)
    whole = products.multiply(x, weight, bias, sizes)
    assert torch.equal(whole, ours(x, weight, bias))
    assert calls == rows // 64 * [64] + rows % 64 // 16 * [16]
    part = aligned(x[begin : begin + length])
    assert torch.equal(products.multiply(part, weight, bias, sizes), whole[begin : begin + length])


def test_rows_that_were_not_tried_like_this_are_ours() -> None:
    """Rows apart from each other, or at another address, may get another kernel."""
    x, weight, _ = problem(32)
    calls: list[int] = []
    products = LibraryProducts(ours, library(lambda rows: False, calls))
    wide = torch.cat((x, x), dim=1)[:, :INPUTS]
    shifted = aligned(torch.cat((x.new_zeros(1), x.flatten())))[1:].view(x.shape)
    for given_rows in (wide, shifted):
        assert torch.equal(
            products.multiply(given_rows, weight, None, (16,)), ours(x, weight, None)
        )
    assert not calls


def test_a_weight_is_tried_once_for_its_shape() -> None:
    x, weight, bias = problem(16)
    calls: list[int] = []
    products = LibraryProducts(ours, library(lambda rows: rows != 256, calls))
    first = products.product_for(weight, None)
    assert set(calls) == set(TRIED_ROWS)
    calls.clear()
    products.product_for(aligned(-weight), None)
    assert not calls
    bias = aligned(bias)
    shifted = aligned(torch.cat((bias[:1], bias)))[1:]  # the same numbers at another address
    for other, added in ((weight, bias), (weight, shifted), (aligned(weight[:16]), None)):
        products.product_for(other, added)
        assert set(calls) == set(TRIED_ROWS)
        calls.clear()
    assert products.product_for(weight.float(), None) is ours
    many = aligned(torch.cat(20 * [x]))
    assert torch.equal(first(many, weight, None), ours(many, weight, None))
    assert calls == [256]

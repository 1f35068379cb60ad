"""Products with codes equal their twin's, in every form that a checkpoint's weights come in."""

from __future__ import annotations

import pytest
import torch

from engine.quantization.gpu import TritonPackedForm
from kernels.packed import (
    INT4_LEVELS,
    MXFP4_LEVELS,
    NF4_LEVELS,
    PackedWeight,
    pack_nibbles,
)
from kernels.reference.quantised import linear_packed
from kernels.triton.quantised import packed_linear, refuse

_LEVELS = {"int4": INT4_LEVELS, "nf4": NF4_LEVELS, "mxfp4": MXFP4_LEVELS}


def _weight(kind, outputs, inputs, group, *, zeros=False, order=False) -> PackedWeight:
    random = torch.Generator().manual_seed(inputs + outputs)
    groups = -(-inputs // group)
    scales = torch.rand(outputs, groups, generator=random) + 0.1
    if kind in _LEVELS:
        codes = pack_nibbles(torch.randint(0, 16, (outputs, inputs), generator=random))
    else:
        codes = torch.randint(0, 256, (outputs, inputs), generator=random).to(torch.uint8)
        if kind == "fp8":
            codes[(codes & 0x7F) == 0x7F] = 0
        codes = codes.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
        scales /= 64
    shift = torch.randint(-3, 4, (outputs, groups), generator=random) if zeros else None
    turned = torch.randperm(inputs, generator=random) if order else None
    shift = None if shift is None else shift.to(torch.int8)
    return PackedWeight(codes, scales, inputs, group, _LEVELS.get(kind), shift, turned)


def _close(weight: PackedWeight, rows: int, *, bias: bool, dtype=torch.float32) -> None:
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, weight.inputs, generator=random).to(dtype)
    added = torch.randn(weight.shape[0], generator=random).to(dtype) if bias else None
    levels = None if weight.levels is None else torch.tensor(weight.levels)
    expected = linear_packed(x.double(), weight, None if added is None else added.double())
    actual = packed_linear(x, weight, levels, added)
    assert actual.dtype == dtype
    error = float((actual.double() - expected).norm() / expected.norm())
    assert error < (1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("kind", [*_LEVELS, "int8", "fp8"])
@pytest.mark.parametrize(("inputs", "group"), [(128, 32), (256, 128), (192, 64), (100, 100)])
def test_products_equal_the_twins(kind: str, inputs: int, group: int) -> None:
    _close(_weight(kind, 70, inputs, group), 3, bias=True)
    _close(_weight(kind, 70, inputs, group, zeros=True, order=True), 3, bias=False)


@pytest.mark.parametrize("rows", [1, 16, 17, 70, 130])
@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_tiles_of_every_height(kind: str, rows: int) -> None:
    _close(_weight(kind, 130, 128, 64, zeros=True), rows, bias=True, dtype=torch.float16)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_inputs_are_split_over_programs(kind: str) -> None:
    """Two thousand inputs of a narrow layer, to the end of the last, shorter split."""
    _close(_weight(kind, 64, 2080, 32, zeros=True), 2, bias=True)


def test_rows_of_a_wider_tensor() -> None:
    weight = _weight("int4", 64, 64, 32)
    wide = torch.full((4, 96), float("nan"))
    wide[:, :64] = torch.randn(4, 64)
    expected = linear_packed(wide[:, :64], weight)
    actual = packed_linear(wide[:, :64], weight, torch.tensor(INT4_LEVELS))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_layer_of_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    """As a GPU has it: the kernel where it can, else widened and told; rows as embeddings."""
    form = TritonPackedForm(torch.float32)
    for group, is_told in ((32, False), (8, True)):
        weight, bias = _weight("int4", 40, 64, group), torch.randn(40)
        layer, x = form.make(weight, bias), torch.randn(5, 64)
        torch.testing.assert_close(layer(x), linear_packed(x, weight, bias), rtol=1e-4, atol=1e-4)
        assert layer.num_bytes == weight.num_bytes + bias.nbytes
        ids = torch.tensor([39, 0])
        assert torch.equal(layer.rows(ids), weight.dequantise(torch.float32)[ids])
        assert ("groups of 8 inputs" in caplog.text) == is_told


def test_groups_shorter_than_a_product_are_refused() -> None:
    assert refuse(_weight("int8", 32, 64, 16)) == "groups of 16 inputs"
    assert refuse(_weight("int8", 32, 48, 48)) is None

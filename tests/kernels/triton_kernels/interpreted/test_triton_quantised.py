"""Products with codes equal the reference, for every form of a checkpoint's weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.quantization.dequant import KernelLinearMethod
from engine.quantization.gpu import TritonPacked
from kernels.packed import PackedWeight
from kernels.reference.quantised import linear_packed
from kernels.tiled import tile, tiling_unsupported_reason
from kernels.triton import quantised, widening
from kernels.triton.packed_tiles import scales_sums
from kernels.triton.quantised import packed_linear
from kernels.triton.widening import MAX_PACKED_ROWS, widen_lines
from tests.kernels.packed_weights import KINDS, packed_weight


def _close(
    weight: PackedWeight,
    rows: int,
    *,
    bias: bool,
    dtype: torch.dtype = torch.float32,
    invariant: bool = False,
) -> None:
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, weight.inputs, generator=random).to(dtype)
    added = torch.randn(weight.shape[0], generator=random).to(dtype) if bias else None
    tiled = tile(weight)  # tests/kernels/test_tiled.py checks its value
    expected = x.double() @ tiled.matrix(0, torch.float64).T + (
        0.0 if added is None else added.double()
    )
    actual = packed_linear(x, tiled, added, invariant=invariant)
    assert actual.dtype == dtype
    error = float((actual.double() - expected).norm() / expected.norm())
    assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("inputs", "group"), [(128, 32), (256, 128), (192, 64), (100, 100), (176, 16)]
)
def test_products_equal_the_twins(kind: str, inputs: int, group: int) -> None:
    _close(packed_weight(kind, 70, inputs, group), 3, bias=True)
    _close(packed_weight(kind, 70, inputs, group, zeros=True, order=True), 3, bias=False)


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 65, MAX_PACKED_ROWS + 1])
@pytest.mark.parametrize("kind", ["int4", "e4m3"])
def test_tiles_of_every_height(kind: str, rows: int) -> None:
    """And of several of the highest, as any number of rows if batch-invariant."""
    weight, many = packed_weight(kind, 130, 128, 64, zeros=True), rows > MAX_PACKED_ROWS
    _close(weight, rows, bias=True, dtype=torch.float16, invariant=many)


def test_weights_are_widened_in_memory_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widening, "MAX_WIDENED_BYTES", 2 * 208 * 33)
    weight = packed_weight("int4", 70, 208, 16, zeros=True, order=True)
    _close(weight, MAX_PACKED_ROWS + 1, bias=True, dtype=torch.float16)
    _close(weight, MAX_PACKED_ROWS + 1, bias=False, dtype=torch.float16)


@pytest.mark.parametrize("kind", KINDS)
def test_a_widened_weight_is_the_same_weight(kind: str) -> None:
    for inputs, group in ((256, 256), (256, 128), (96, 32), (80, 16), (50, 50)):
        for zeros in (False, True):
            weight = tile(packed_weight(kind, 70, inputs, group, zeros=zeros))
            made = torch.empty(41, inputs)
            widen_lines(made, weight, 3)
            torch.testing.assert_close(
                made, weight.matrix(0, torch.float32)[3:44], rtol=1e-6, atol=1e-5
            )


@pytest.mark.parametrize("group", [128, 256, 640])
@pytest.mark.parametrize("kind", ["int4", "int4 with zeros", "e4m3"])
def test_sums_of_whole_groups_are_scaled(group: int, kind: str) -> None:
    """As in GPTQ and AWQ, with whole zeros, and in FP8: in groups of 128, or one for all inputs."""
    random = torch.Generator().manual_seed(group)
    weight = packed_weight(kind.split()[0], 70, 640, group)
    if "zeros" in kind:
        zeros = torch.randint(-8, 9, weight.scales.shape, generator=random, dtype=torch.int8)
        weight = replace(weight, zeros=zeros)
    for dtype in (torch.float16, torch.bfloat16):
        for rows in (5, 20):
            assert scales_sums(tile(weight), rows, dtype)
            _close(weight, rows, bias=True, dtype=dtype)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_inputs_are_split_over_programs(kind: str) -> None:
    """Equally, and with a shorter or no last part."""
    for inputs in (2048, 2080, 1168, 4368):
        _close(packed_weight(kind, 64, inputs, 16, zeros=True), 2, bias=True)


@pytest.mark.parametrize(
    ("num_warps", "input_tiles", "splits"),
    [(1792, 32, 1), (384, 32, 4), (256, 112, 8), (180, 23, 5), (4, 3, 1), (0, 8, 2)],
)
def test_splits_are_equal_where_that_leaves_enough(
    num_warps: int, input_tiles: int, splits: int
) -> None:
    """For layers of an 8B model and of GPT-OSS, and where there is nothing to split."""
    assert quantised._num_splits(num_warps, input_tiles) == splits


def test_exponents_for_scales() -> None:
    weight = packed_weight("e2m1", 40, 96, 32)
    scales = torch.ldexp(torch.ones(40, 3), torch.randint(-9, 3, (40, 3)))
    weight = PackedWeight(weight.codes, scales, 96, 32, weight.levels)
    assert tile(weight).scales.dtype == torch.uint8
    _close(weight, 5, bias=True)
    _close(weight, 5, bias=True, dtype=torch.float16)
    _close(weight, 5, bias=True, dtype=torch.bfloat16)


def test_rows_of_a_wider_tensor() -> None:
    weight = packed_weight("int4", 64, 64, 32)
    wide = torch.full((4, 96), float("nan"))
    wide[:, :64] = torch.randn(4, 64)
    expected = wide[:, :64] @ tile(weight).matrix(0, torch.float32).T
    actual = packed_linear(wide[:, :64], tile(weight))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_layer_of_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    """As on a GPU: the kernel if possible, otherwise dequantised and logged; rows as embeddings."""
    held = partial(TritonPacked, refuse_scaled=lambda _: None)
    form = KernelLinearMethod(torch.float32, tiling_unsupported_reason, held)
    for group, is_told in ((32, False), (8, True)):
        weight, bias = packed_weight("int4", 40, 64, group), torch.randn(40)
        layer, x = form.make(weight, bias), torch.randn(5, 64)
        expected = linear_packed(x, weight, bias)
        assert float((layer(x) - expected).norm() / expected.norm()) < 2e-3
        assert layer.num_bytes <= weight.num_bytes + bias.nbytes
        ids = torch.tensor([39, 0])
        rows = weight.dequantise(torch.float32)[ids]
        torch.testing.assert_close(layer.rows(ids), rows, rtol=1e-3, atol=1e-3)
        assert ("groups of 8 inputs" in caplog.text) == is_told

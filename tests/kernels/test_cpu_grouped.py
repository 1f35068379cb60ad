"""Products with a checkpoint's codes, compared with float64 products of the dequantised weights."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import linear
from kernels.cpu.grouped import PanelGrouped, refuse
from kernels.packed import (
    INT4_LEVELS,
    MXFP4_LEVELS,
    NF4_LEVELS,
    PackedWeight,
    pack_nibbles,
)
from tests.kernels import cpu_targets

pytestmark = pytest.mark.skipif(not linear.is_available(), reason="no native kernels here")

_LEVELS = {"int4": INT4_LEVELS, "nf4": NF4_LEVELS, "mxfp4": MXFP4_LEVELS}
# Up to four rows in registers; the last vector tile; blocks of AMX.
_ROWS = (1, 2, 4, 5, 17, 40)
# Outputs, inputs, group: partial panels and groups, and groups across panels.
_SHAPES = ((97, 128, 32), (64, 100, 16), (33, 256, 128), (40, 60, 60))


@pytest.fixture(params=cpu_targets.WAYS)
def in_register(request, monkeypatch) -> int:
    """Each kernel path, with the number of rows that it multiplies directly by codes."""
    return 0 if cpu_targets.use(request.param, monkeypatch) else 4


def _weight(kind, shape, *, zeros=False, order=False, scale=0.01, seed=0) -> PackedWeight:
    outputs, inputs, group = shape
    generator = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group)
    scales = (torch.rand(outputs, groups, generator=generator) + 0.1) * scale
    if kind in _LEVELS:
        codes = pack_nibbles(torch.randint(0, 16, (outputs, inputs), generator=generator))
    else:
        codes = torch.randint(0, 256, (outputs, inputs), generator=generator).to(torch.uint8)
        if kind == "fp8":  # all of its values, except the nans
            codes[(codes & 0x7F) == 0x7F] = 0
        codes = codes.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    shift = torch.randint(-3, 4, (outputs, groups), generator=generator) if zeros else None
    turned = torch.randperm(inputs, generator=generator) if order else None
    return PackedWeight(codes, scales, inputs, group, _LEVELS.get(kind), shift, turned)


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", [*_LEVELS, "int8", "fp8"])
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize(("zeros", "order"), [(False, False), (True, False), (True, True)])
def test_products_are_those_of_what_the_codes_stand_for(kind, shape, zeros, order, in_register):
    weight = _weight(kind, shape, zeros=zeros, order=order)
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(1))
    layer, dense = PanelGrouped(weight, bias, torch.bfloat16), weight.dequantise(torch.float64)
    for rows in _ROWS:
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).bfloat16()
        expected = x.double() @ dense.T + bias.double()
        scores = layer.logits(x)
        # In registers the sums use the codes themselves. Elsewhere weights are rounded to bfloat16,
        # as the levels of nf4 always are.
        exact = rows <= in_register and kind != "nf4"
        assert _error(scores, expected) < (1e-3 if exact else 5e-3)
        assert torch.equal(scores.bfloat16(), layer(x))
    ids = torch.tensor([shape[0] - 1, 0, 31])
    assert _error(layer.rows(ids), dense[ids]) < 5e-3


@pytest.mark.parametrize("kind", ["int4", "fp8"])
@pytest.mark.parametrize("scale", [1e-12, 1e-5, 1e6])
def test_scales_of_any_size(kind, scale, in_register):
    weight = _weight(kind, (40, 64, 32), scale=scale)
    layer, x = PanelGrouped(weight, None, torch.bfloat16), torch.randn(3, 64).bfloat16()
    expected = x.double() @ weight.dequantise(torch.float64).T
    assert _error(layer.logits(x), expected) < (1e-3 if in_register else 5e-3)


@pytest.mark.usefixtures("in_register")
def test_powers_of_two_are_exact_over_forty_binary_orders():
    weight = _weight("mxfp4", (32, 64, 32))
    scales = torch.ldexp(torch.ones(32, 2), torch.arange(64).view(32, 2) % 28 - 20)
    weight = PackedWeight(weight.codes, scales, 64, 32, MXFP4_LEVELS)
    layer = PanelGrouped(weight, None, torch.bfloat16)
    ids = torch.arange(32)
    assert torch.equal(layer.rows(ids).double(), weight.dequantise(torch.float64))


@pytest.mark.usefixtures("in_register")
def test_every_code_of_float8_is_exact():
    codes = torch.arange(256).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    weight = PackedWeight(codes.view(torch.float8_e4m3fn)[None], torch.ones(1, 1), 256, 256)
    layer = PanelGrouped(weight, None, torch.bfloat16)
    assert torch.equal(layer.rows(torch.tensor([0]))[0].float(), weight.codes[0].float())
    one_by_one = torch.cat([layer(row[None]) for row in torch.eye(256).bfloat16()])
    assert torch.equal(one_by_one[:, 0].float(), weight.codes[0].float())


@pytest.mark.usefixtures("in_register")
def test_eight_bits_for_rounded_activations_are_the_int8_layer():
    weight = _weight("int8", (50, 96, 96))
    weight.codes.clamp_(min=linear.min_code())
    layer = linear.PanelInt8.from_codes(weight, None, torch.bfloat16)
    dense = weight.dequantise(torch.float64)
    ids = torch.tensor([49, 3])
    assert _error(layer.rows(ids), dense[ids]) < 3e-3
    for rows in (1, 20):
        x = torch.randn(rows, 96).bfloat16()
        assert _error(layer(x), x.double() @ dense.T) < 0.02


def test_memory_is_that_of_the_codes():
    for kind, most in (("int4", 0.57), ("fp8", 1.04)):
        layer = PanelGrouped(_weight(kind, (512, 1024, 128)), None, torch.bfloat16)
        assert layer.num_bytes <= 512 * 1024 * most


def test_groups_that_cut_through_words_are_refused():
    assert refuse(_weight("int4", (32, 64, 20))) == "groups of 20 inputs"
    assert refuse(_weight("int8", (32, 64, 20))) is None
    assert refuse(_weight("int4", (32, 60, 60))) is None

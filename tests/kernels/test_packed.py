"""Packed weights: the meaning of their fields, which slicing and joining preserve."""

from __future__ import annotations

import pytest
import torch

from engine.models.linear import DensePerHeadLinear, UnquantizedLinearMethod
from engine.quantization.dequant import DequantLinearMethod
from engine.quantization.experts import StackedExpertsMethod
from engine.quantization.method import WeightMethod
from kernels.packed import (
    INT4_LEVELS,
    MXFP4_LEVELS,
    NF4_LEVELS,
    PackedParts,
    PackedWeight,
    pack_nibbles,
)
from kernels.reference.matmul import invariant_heads


def _weight(outputs, inputs, group, *, kind="int4", zeros=False, order=None, seed=0):
    """A random weight, and its dequantised value computed element by element."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group)
    scales = torch.rand(outputs, groups, generator=generator) + 0.1
    shifts = torch.randint(-3, 4, (outputs, groups), generator=generator) if zeros else None
    levels = {"int4": INT4_LEVELS, "nf4": NF4_LEVELS, "mxfp4": MXFP4_LEVELS}.get(kind)
    if levels is not None:
        codes = torch.randint(0, 16, (outputs, inputs), generator=generator)
        values = [[levels[code] for code in row] for row in codes.tolist()]
        held = pack_nibbles(codes)
    elif kind == "int8":
        held = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8)
        values = held.tolist()
    else:
        held = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn)
        values = held.double().tolist()
    dense = torch.zeros(outputs, inputs, dtype=torch.float64)
    for n in range(outputs):
        for k in range(inputs):
            zero = 0 if shifts is None else int(shifts[n, k // group])
            place = k if order is None else int(order[k])
            dense[n, place] = (values[n][k] - zero) * float(scales[n, k // group])
    packed = PackedWeight(held, scales, inputs, group, levels, shifts, order)
    return packed, dense


@pytest.mark.parametrize("kind", ["int4", "nf4", "mxfp4", "int8", "fp8"])
@pytest.mark.parametrize("inputs", [7, 64])
@pytest.mark.parametrize("group", [3, 32, 64])
def test_a_code_stands_for_its_level_less_zero_times_scale(kind, inputs, group):
    group = min(group, inputs)
    for zeros in (False, True):
        for order in (None, torch.randperm(inputs)):
            packed, dense = _weight(9, inputs, group, kind=kind, zeros=zeros, order=order)
            assert packed.shape == (9, inputs)
            torch.testing.assert_close(packed.dequantise(torch.float64), dense, rtol=1e-6, atol=0)
            some = torch.tensor([8, 0, 8])
            assert torch.equal(
                packed.select(some).dequantise(torch.float32),
                packed.dequantise(torch.float32)[some],
            )


def test_neighbours_of_one_form_become_one_and_others_stay():
    order = torch.randperm(64)
    same = [_weight(n, 64, 32, order=order, seed=n)[0] for n in (3, 5)]
    other = _weight(4, 64, 32, order=torch.randperm(64))[0]
    plain = torch.randn(2, 64)
    parts = PackedParts((*same, other, plain, plain))
    whole = parts.dequantise(torch.float32)
    assert whole.shape == parts.shape == (16, 64)
    joined = parts.joined()
    assert [part.shape[0] for part in joined] == [8, 4, 4]
    assert torch.equal(PackedParts(joined).dequantise(torch.float32), whole)
    for count in (1, 2, 4, 8, 16):
        cut = parts.split(count)
        assert {part.shape for part in cut} == {(16 // count, 64)}
        assert torch.equal(torch.cat([part.dequantise(torch.float32) for part in cut]), whole)
    with pytest.raises(ValueError, match="not 3 times as many"):
        parts.split(3)
    within = torch.cat((torch.randperm(8), 8 + torch.randperm(4), 12 + torch.randperm(4)))
    assert torch.equal(parts.select(within).dequantise(torch.float32), whole[within])
    with pytest.raises(ValueError, match="cannot change places"):
        parts.select(torch.arange(15, -1, -1))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_parts_of_eight_bits_join_too(kind):
    parts = PackedParts(tuple(_weight(4, 32, 32, kind=kind, seed=n)[0] for n in range(3)))
    (joined,) = parts.joined()
    assert joined.codes.dtype == parts.parts[0].codes.dtype
    assert torch.equal(joined.dequantise(torch.float32), parts.dequantise(torch.float32))


def test_a_layer_of_unlike_parts_is_layers_side_by_side():
    method = WeightMethod(
        UnquantizedLinearMethod(),
        DequantLinearMethod(torch.float32),
        StackedExpertsMethod(torch.float32, lambda: None),
        UnquantizedLinearMethod(),
        lambda weight: DensePerHeadLinear(weight, invariant_heads),
    )
    parts = PackedParts((_weight(4, 32, 32)[0], torch.randn(3, 32), _weight(5, 32, 8)[0]))
    bias, x = torch.randn(12), torch.randn(6, 32)
    layer = method.make(parts, bias)
    expected = torch.nn.functional.linear(x, parts.dequantise(torch.float32), bias)
    torch.testing.assert_close(layer(x), expected)
    assert layer.num_bytes < parts.shape[0] * 32 * 4
    head = method.make_head(PackedParts(parts.parts[:1]))
    ids = torch.tensor([3, 0])
    assert torch.equal(head.rows(ids), parts.dequantise(torch.float32)[ids])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"codes": torch.zeros(4, 31, dtype=torch.uint8)}, "codes"),
        ({"codes": torch.zeros(4, 16, dtype=torch.int32)}, "uint8"),
        ({"levels": None}, "int8 or float8"),
        ({"scales": torch.ones(4, 3)}, "3 groups of 16"),
        ({"zeros": torch.ones(4, 1)}, "zeros"),
        ({"order": torch.arange(3)}, "order"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, told):
    fields = {
        "codes": torch.zeros(4, 16, dtype=torch.uint8),
        "scales": torch.ones(4, 2),
        "inputs": 32,
        "group_size": 16,
        "levels": INT4_LEVELS,
        **change,
    }
    with pytest.raises(ValueError, match=told):
        PackedWeight(**fields)

"""Codes rearranged for the GPU kernels keep their values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kernels.packed import INT4_LEVELS, MXFP4_LEVELS, NF4_LEVELS, PackedParts, PackedWeight
from kernels.reference.quantised import quantise_mxfp4
from kernels.tiled import TiledWeight, tile, tile_experts, tiling_unsupported_reason
from tests.kernels.packed_weights import KINDS, packed_weight


def dense(weight: TiledWeight) -> torch.Tensor:
    """The dequantised matrices, concatenated."""
    return torch.cat([weight.matrix(i, torch.float64) for i in range(weight.num_matrices)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inputs", "group"), [(128, 32), (80, 16), (50, 50), (33, 16)])
def test_a_tiled_weight_is_the_same_weight(kind: str, inputs: int, group: int) -> None:
    for zeros in (False, True):
        for order in (False, True):
            weight = packed_weight(kind, 37, inputs, group, zeros=zeros, order=order)
            expected = weight.dequantise(torch.float64)
            # Zeros are rounded relative to their own size, even where the difference is small.
            lost = 2**-11 * 12 * 1.1 if zeros else 0.0
            torch.testing.assert_close(dense(tile(weight)), expected, rtol=2**-11, atol=lost)
            ids = torch.tensor([36, 0, 36])
            whole = dense(tile(weight)).float()
            assert torch.equal(tile(weight).rows(ids, torch.float32), whole[ids])


@pytest.mark.parametrize("span", [2.0**-20, 1.0, 2.0**20])
def test_scales_of_any_size_keep_their_precision(span: float) -> None:
    weight = packed_weight("int4", 8, 128, 32)
    weight = PackedWeight(weight.codes, weight.scales * span, 128, 32, weight.levels)
    tiled = tile(weight)
    assert tiled.scales.dtype == torch.float16
    expected = weight.dequantise(torch.float64)
    torch.testing.assert_close(dense(tiled), expected, rtol=2**-11, atol=0)


def test_powers_of_two_take_a_byte_and_lose_nothing() -> None:
    weight = packed_weight("e2m1", 24, 2880, 32)
    scales = torch.ldexp(torch.ones(24, 90), torch.randint(-120, 10, (24, 90)))
    weight = PackedWeight(weight.codes, scales, 2880, 32, MXFP4_LEVELS)
    tiled = tile(weight)
    assert tiled.nbytes == 24 * (2880 // 2 + 90) + 64  # as in a file, plus levels
    assert torch.equal(dense(tiled), weight.dequantise(torch.float64))


def test_zeros_far_from_the_levels_are_kept() -> None:
    weight = packed_weight("int4", 8, 128, 128)
    for most, kept in ((120, torch.int8), (121, torch.float16)):
        zeros = torch.arange(most - 7, most + 1, dtype=torch.int8)[:, None]
        tiled = tile(replace(weight, zeros=zeros))
        assert tiled.zeros is not None
        assert tiled.zeros.dtype == kept
        assert torch.equal(tiled.zeros.to(torch.int8), zeros)


@pytest.mark.parametrize("order", [False, True])
def test_experts_come_one_after_the_other(order: bool) -> None:
    """Each in parts; all with a common order of inputs or each with its own."""
    for shared in (False, True):
        parts = []
        for expert in range(3):
            for part in range(2):
                seed = 0 if shared else expert
                weight = packed_weight("int4", 10, 64, 32, order=order, seed=seed)
                parts.append(weight if part else weight.select(torch.arange(9, -1, -1)))
        tiled = tile_experts(PackedParts(tuple(parts)), 3)
        assert (tiled.num_matrices, tiled.outputs) == (3, 20)
        assert (tiled.orders is not None) == order
        expected = torch.cat([part.dequantise(torch.float64) for part in parts])
        torch.testing.assert_close(dense(tiled), expected, rtol=2**-11, atol=1e-9)


def test_what_cannot_be_held_so_is_told() -> None:
    assert tiling_unsupported_reason(packed_weight("int8", 8, 64, 8)) == "groups of 8 inputs"
    assert tiling_unsupported_reason(packed_weight("int8", 8, 24, 24)) is None
    mixed = packed_weight("int4", 8, 64, 32), packed_weight("int8", 8, 64, 32)
    short = packed_weight("int4", 16, 64, 8)
    for parts, count, told in (
        (mixed, 1, "not in the same codes"),
        (mixed, 2, "experts in different codes"),
        ((short,), 2, "groups of 8 inputs"),
        ((mixed[0], torch.zeros(8, 64)), 2, "not in the same codes"),
    ):
        with pytest.raises(ValueError, match=told):
            tile_experts(PackedParts(parts), count)


def test_every_kind_has_its_name() -> None:
    named = {kind: tile(packed_weight(kind, 4, 32, 32)).kind for kind in KINDS}
    assert named == {
        **{"int4": "int4", "e2m1": "e2m1", "int8": "int8", "e4m3": "e4m3"},
        "nf4": "table",
    }
    assert len({INT4_LEVELS, MXFP4_LEVELS, NF4_LEVELS}) == 3


def test_rounding_to_mxfp4_takes_the_nearest_float_of_a_power_of_two() -> None:
    """As in OCP Microscaling Formats 1.0, 6.3, element by element."""
    weight = torch.randn(3, 70, generator=torch.Generator().manual_seed(1)) * 0.05
    weight[1, :32] = 0.0
    packed = quantise_mxfp4(weight)
    made = packed.dequantise(torch.float64)
    for n in range(3):
        for k in range(70):
            block = weight[n, k // 32 * 32 : k // 32 * 32 + 32].tolist()
            largest = max(abs(value) for value in block)
            step = 2.0 ** (math.floor(math.log2(largest)) - 2) if largest else 1.0
            value = float(weight[n, k])
            nearest = min(abs(level * step - value) for level in MXFP4_LEVELS)
            assert abs(float(made[n, k]) - value) == pytest.approx(nearest, abs=1e-12)
    assert tile(packed).scales.dtype == torch.uint8

"""Rounding: grids, GPTQ against rounding to nearest, AWQ's searches, packed words."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.quantize.awq import CalibratedWeight, search_clip_ratios, search_scale
from tools.quantize.compressed import pack
from tools.quantize.gptq import GptqOptions, gptq
from tools.quantize.grid import Grid, round_to_nearest
from tools.quantize.inputs import InputStats, output_error

GRIDS = [
    Grid(4, group_size=16),
    Grid(4, group_size=16, symmetric=False),
    Grid(4, group_size=16, scale_dtype=torch.bfloat16),
    Grid(8),
    Grid(8, symmetric=False),
    Grid(8, is_float=True),
]


def layer(seed: int, outputs: int = 24, inputs: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and inputs that are correlated as those of a model are: [500, inputs]."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    mixed = torch.randn(500, inputs // 4, generator=generator)
    inputs_ = mixed @ torch.randn(inputs // 4, inputs, generator=generator)
    inputs_ += 0.3 * torch.randn(500, inputs, generator=generator)
    return weight, inputs_ * torch.rand(inputs, generator=generator).mul(4).exp()


def seen(x: torch.Tensor) -> InputStats:
    stats = InputStats(x.shape[1], x.device)
    for rows in x.split(100):
        stats.add(rows)
    return stats


def error(weight: torch.Tensor, value: torch.Tensor, x: torch.Tensor) -> float:
    """The error of the layer's output, measured by running it."""
    return float((x @ (weight - value).T).square().sum() / (x @ weight.T).square().sum())


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_weight_is_rounded_to_the_nearest_level_of_its_group(grid: Grid) -> None:
    weight, _ = layer(0)
    weight[3, 16:32] = 0.0  # a group of zeros
    rounded = round_to_nearest(weight, grid)
    value = rounded.dequantise()
    assert value[3, 16:32].abs().max() == 0.0
    size = grid.group_size_of(64)
    for row, group in ((0, 0), (5, 64 // size - 1)):
        columns = slice(group * size, group * size + size)
        scale = rounded.scales.scale[row, group]
        zero = 0.0 if rounded.scales.zero is None else rounded.scales.zero[row, group]
        if grid.is_float:
            codes = torch.arange(-128, 128, dtype=torch.int8).view(torch.float8_e4m3fn).float()
            codes = codes[codes.isfinite()]
        else:
            codes = torch.arange(grid.lowest, grid.highest + 1)
        levels = (codes - zero) * scale
        nearest = (weight[row, columns].unsqueeze(1) - levels).abs().amin(1)
        found = (weight[row, columns] - value[row, columns]).abs()
        assert torch.allclose(found, nearest, atol=1e-6)
    assert rounded.scales.scale.to(grid.scale_dtype).float().equal(rounded.scales.scale)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), by_activity=st.booleans(), which=st.integers(0, 3))
def test_gptq_says_what_the_layer_said_better_than_rounding_to_nearest(
    seed: int, by_activity: bool, which: int
) -> None:
    grid = GRIDS[which]
    weight, x = layer(seed)
    better = gptq(weight, seen(x).hessian, grid, GptqOptions(by_activity=by_activity))
    nearest = round_to_nearest(weight, grid)
    assert error(weight, better.dequantise(), x) < 0.8 * error(weight, nearest.dequantise(), x)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("by_activity", [False, True])
def test_gptq_of_inputs_that_have_nothing_to_do_with_each_other_is_rounding_to_nearest(
    grid: Grid, by_activity: bool
) -> None:
    weight, _ = layer(1)
    apart = torch.diag(torch.linspace(1, 2, 64))
    rounded = gptq(weight, apart, grid, GptqOptions(by_activity=by_activity))
    nearest = round_to_nearest(weight, grid)
    assert rounded.codes.float().equal(nearest.codes.float())
    assert rounded.scales.scale.equal(nearest.scales.scale)


def test_gptq_bears_inputs_that_never_come_and_fewer_tokens_than_inputs() -> None:
    weight, x = layer(2)
    x[:, 7] = 0.0
    few = seen(x[:20]).hessian
    value = gptq(weight, few, Grid(4, group_size=16), GptqOptions()).dequantise()
    assert value.isfinite().all()
    assert error(weight, value, x[:20]) < 0.02
    with pytest.raises(ValueError, match="not finite"):
        gptq(weight, few * float("inf"), Grid(4), GptqOptions())


def test_the_error_told_is_that_of_running_the_layer() -> None:
    weight, x = layer(3)
    value = round_to_nearest(weight, Grid(4, group_size=16)).dequantise()
    told = output_error(weight, value, seen(x).hessian)
    assert told == pytest.approx(error(weight, value, x), rel=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_scales_and_shrinking_are_never_worse_than_none_and_here_better(seed: int) -> None:
    weight, x = layer(seed)
    grid, stats = Grid(4, group_size=16), seen(x)
    plain = error(weight, round_to_nearest(weight, grid).dequantise(), x)
    scale = search_scale([CalibratedWeight(weight, stats)], grid)
    scaled = round_to_nearest(weight * scale, grid).dequantise() / scale
    assert error(weight, scaled, x) < 0.9 * plain
    shrink = search_clip_ratios(weight, torch.eye(64), grid)
    cut = round_to_nearest(weight, grid, shrink).dequantise()
    plain_change = (weight - round_to_nearest(weight, grid).dequantise()).square()
    by_group = (weight - cut).square().unflatten(1, (-1, 16)).sum(-1)
    assert (by_group <= plain_change.unflatten(1, (-1, 16)).sum(-1) + 1e-6).all()
    assert by_group.sum() < 0.97 * plain_change.sum()


def test_stats_of_scaled_inputs_are_those_of_the_scaled_inputs() -> None:
    _, x = layer(4)
    factor = torch.linspace(0.5, 2, 64)
    stats = seen(x)
    stats.scale(factor)
    expected = seen(x * factor).hessian
    assert (stats.hessian - expected).norm() < 1e-5 * expected.norm()
    assert torch.allclose(stats.magnitude, seen(x * factor).magnitude, rtol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [64, 21])
def test_codes_lie_in_words_from_the_low_bits_upwards(bits: int, inputs: int) -> None:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = torch.randint(low, high, (5, inputs), dtype=torch.int8)
    words = pack(codes, bits)
    for row in range(5):
        whole = sum((int(word) % 2**32) << (32 * place) for place, word in enumerate(words[row]))
        found = [(whole >> (bits * k)) % 2**bits + low for k in range(inputs)]
        assert found == codes[row].tolist()


@pytest.mark.parametrize("by_activity", [False, True])
def test_gptq_in_blocks_is_the_papers_loop_over_all_inputs(by_activity: bool) -> None:
    weight, x = layer(5, outputs=8, inputs=320)
    grid, hessian = Grid(4), seen(x).hessian
    found = gptq(weight, hessian, grid, GptqOptions(0.05, by_activity)).dequantise()
    order = torch.arange(320)
    if by_activity:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    damped = (hessian + 0.05 * hessian.diagonal().mean() * torch.eye(320))[order][:, order]
    factor = torch.linalg.cholesky(torch.linalg.inv(damped.double()), upper=True).float()
    scales, left = grid.fit(weight).column(0), weight[:, order].clone()
    for j in range(320):
        rounded = grid.fake_quantise(left[:, j], scales)
        change = (left[:, j] - rounded) / factor[j, j]
        left[:, j + 1 :] -= torch.outer(change, factor[j, j + 1 :])
        left[:, j] = rounded
    expected = torch.empty_like(left)
    expected[:, order] = left
    assert (found - expected).abs().gt(1e-4).float().mean() < 0.02  # ties round either way

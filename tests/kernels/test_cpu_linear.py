"""The native linear layers, compared with float64, on every code path by number of rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from kernels.bench import linear as bench
from kernels.cpu import layers, linear
from kernels.cpu.grouped import PanelGrouped
from kernels.cpu.memory import Arena, mapped_zeros
from kernels.cpu.native import build
from kernels.moe import GatedActivation
from kernels.reference.quantised import (
    linear_packed,
    quantise_fp8,
    quantise_int4,
    quantise_int8,
    quantise_nf4,
)
from tests.kernels import cpu_targets

native = pytest.mark.skipif(not linear.is_available(), reason="no native linear layers here")
# One row, the last row of a tile and the first after it, more than one block of cached rows.
_ROWS = (1, 2, 3, 6, 7, 12, 13, 16, 17, 32, 33, 70)
_SHAPES = ((1, 32), (50, 64), (97, 31), (896, 100), (33, 4864))  # outputs, inputs

_GATINGS = (
    GatedActivation(layers.silu_mul, "silu"),
    GatedActivation(layers.erf_gelu_mul, "gelu"),
    GatedActivation(layers.gelu_mul, "gelu_tanh"),
    GatedActivation(
        lambda gate_up: layers.clamped_swiglu(gate_up, 1.7, 0.5), "clamped_swiglu", 1.7, 0.5
    ),
    GatedActivation(
        lambda gate_up: layers.clamped_silu_mul(gate_up, 0.5), "clamped_silu", limit=0.5
    ),
)


@pytest.fixture(params=cpu_targets.WAYS)
def few(request, monkeypatch) -> int:
    """Each kernel path, with the number of rows up to which int4 is multiplied in groups."""
    return 2**30 if cpu_targets.use(request.param, monkeypatch) else 6


def _problem(rows: int, outputs: int, inputs: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    x = (torch.randn(rows, inputs, generator=generator) + 0.5).bfloat16()
    return x, weight, torch.randn(outputs, generator=generator)


def _error(
    actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> float:
    expected = x.double() @ weight.double().T + bias.double()
    return float((actual.double() - expected).norm() / expected.norm())


def _to_eight_bits(x: torch.Tensor) -> torch.Tensor:
    """Rows rounded to 256 steps between their minimum and maximum, including zero."""
    low, high = x.double().aminmax(dim=1, keepdim=True)
    low, high = low.clamp(max=0), high.clamp(min=0)
    step = (high - low) / 255
    zero = (-low / step).round()
    return (((x.double() / step).round() + zero).clamp(0, 255) - zero) * step


def _in_groups(x: torch.Tensor) -> torch.Tensor:
    """Rows rounded to 255 even steps around zero in each group of 32 values."""
    groups = functional.pad(x.double(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    step = groups.abs().amax(2, keepdim=True) / 127
    return ((groups / step).round() * step).nan_to_num().flatten(1)[:, : x.shape[1]]


def _widened(weight: torch.Tensor) -> torch.Tensor:
    """The int4 weight as used for many rows: rounded again to int8 per output."""
    scale = _whole_scale(weight)
    codes = quantise_int4(weight).dequantise(torch.float64) / scale
    return (codes + 0.5).floor() * scale  # ties round up


def _whole_scale(weight: torch.Tensor) -> torch.Tensor:
    return quantise_int4(weight).scales.double().abs().amax(1, keepdim=True) * 8 / 127


@native
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize("rows", _ROWS)
def test_products_are_those_of_the_weights_that_are_held(rows, shape, few):
    x, weight, bias = _problem(rows, *shape, seed=rows)
    assert _error(linear.PanelDense(weight, bias)(x), x, weight, bias) < 5e-3
    rounded = quantise_int8(weight).dequantise(torch.float64)
    assert _error(linear.PanelInt8(weight, bias)(x), _to_eight_bits(x), rounded, bias) < 5e-3
    rounded = quantise_int4(weight).dequantise(torch.float64)
    in_groups = linear.PanelInt4(weight, bias)(x[:few])
    assert _error(in_groups, _in_groups(x[:few]), rounded, bias) < 5e-3
    if rows > few:
        many = linear.PanelInt4(weight, bias)(x)
        assert _error(many, _to_eight_bits(x), _widened(weight), bias) < 5e-3


@native
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("gating", _GATINGS, ids=lambda gating: gating.kind)
@pytest.mark.parametrize("rows", [1, 5, 33, 1100])  # the last one exceeds the cache
def test_gated_products_have_the_bits_of_a_product_that_is_gated(rows, gating):
    x, weight, bias = _problem(rows, 192, 1184, seed=rows)
    weight *= 0.02
    makes = (linear.PanelDense, linear.PanelInt8, linear.PanelInt4)
    for layer in (*(make(weight, bias) for make in makes), _grouped(weight, bias)):
        assert torch.equal(layer.forward_gated(x, gating), gating(layer(x)))
    uneven = linear.PanelInt8(weight[:100], bias[:100])  # no panel ends where the gate does
    assert torch.equal(uneven.forward_gated(x, gating), gating(uneven(x)))


def _grouped(weight: torch.Tensor, bias: torch.Tensor) -> PanelGrouped:
    return PanelGrouped(quantise_nf4(weight), bias, torch.bfloat16)


@native
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_scores_of_tokens_are_the_sums_unrounded(rows):
    x, weight, bias = _problem(rows, 97, 128, seed=rows)
    for make in (linear.PanelDense, linear.PanelInt8, linear.PanelInt4):
        layer = make(weight, bias)
        scores = layer.logits(x)
        assert scores.dtype == torch.float32
        assert torch.equal(scores.bfloat16(), layer(x))
    assert _error(linear.PanelDense(weight, bias).logits(x), x, weight, bias) < 1e-6


@native
@pytest.mark.usefixtures("few")
def test_many_rows_and_no_rows():
    x, weight, _ = _problem(1500, 40, 2048, seed=0)  # more rows than a block holds
    for make in (linear.PanelDense, linear.PanelInt8, linear.PanelInt4):
        layer = make(weight, None)
        assert _error(layer(x), x, weight, torch.zeros(40)) < 0.12
        assert layer(x[:0]).shape == (0, 40)


@native
@pytest.mark.parametrize("make", [linear.PanelDense, linear.PanelInt8, linear.PanelInt4])
@pytest.mark.parametrize("rows", [20, 70])  # with few tiles, which are divided, and with many
def test_a_row_has_the_same_bits_alone_and_in_a_crowd(make, few, rows):
    x, weight, bias = _problem(rows, 100, 1100, seed=1)
    layer = make(weight, bias)
    if make is linear.PanelInt4:
        x = x[:few]
    crowd = layer(x)
    for row in {0, 3, len(x) // 6, len(x) // 2, len(x) - 1}:
        assert torch.equal(layer(x[row : row + 1])[0], crowd[row])


@native
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("make", [linear.PanelDense, linear.PanelInt8, linear.PanelInt4])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_row_does_not_touch_the_others(make, broken):
    x, weight, bias = _problem(20, 64, 64, seed=2)
    layer = make(weight, bias)
    clean = layer(x)
    x[7, 3] = broken
    found = layer(x)
    others = [row for row in range(20) if row != 7]
    assert torch.equal(found[others], clean[others])
    assert not found[7].isfinite().any()


@native
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("rows", [1, 6, 70])
def test_the_largest_codes_are_multiplied_exactly(rows):
    """Some processors add products of neighbours in 16 bits, where these just have room."""
    pick = torch.Generator().manual_seed(rows)
    # Codes -128 and 127 of activations, 127 and -127 of weights: first alike, then at random.
    x = torch.where(torch.rand(rows, 192, generator=pick) < 0.5, -128.0, 127.0)
    weight = torch.where(torch.rand(96, 192, generator=pick) < 0.5, -127.0, 127.0)
    x[:, :64], x[:, 64:96] = -128.0, 127.0
    weight[::3, :96], weight[1::3, :96] = 127.0, -127.0
    found = linear.PanelInt8(weight.bfloat16(), None).logits(x.bfloat16())
    assert torch.equal(found, x @ weight.T)


@native
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("make", [linear.PanelDense, linear.PanelInt8])
def test_rows_of_a_weight_come_back_as_embeddings(make):
    _, weight, _ = _problem(1, 97, 50, seed=3)
    ids = torch.tensor([96, 0, 31, 32, 31])
    found = make(weight, None).rows(ids)
    assert found.shape == (5, 50)
    torch.testing.assert_close(found, weight[ids], rtol=0.01, atol=0.02)
    if make is linear.PanelDense:
        assert torch.equal(found, weight[ids])


@native
@pytest.mark.parametrize("shape", [(97, 50), (64, 128), (1, 31)])
def test_weights_are_rounded_as_the_reference_rounds_them(shape, few):
    outputs, inputs = shape
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7)).bfloat16()
    weight[0, :3] = 0.0
    expected = quantise_int8(weight).dequantise(torch.bfloat16)
    assert torch.equal(linear.PanelInt8(weight, None).rows(torch.arange(outputs)), expected)
    layer = linear.PanelInt4(weight, None)
    # Activations in integer steps within each group, so that all products are exact.
    exact = quantise_int4(weight).dequantise(torch.float32) * 127
    ones = 127 * torch.eye(inputs).bfloat16()
    assert torch.equal(torch.cat([layer.logits(row[None]) for row in ones]).T, exact)
    if len(ones) <= few:
        assert torch.equal(layer.logits(ones).T, exact)
        return
    # Factors have eleven bits: a few codes in many rows are off by one.
    widened, scale = _widened(weight), _whole_scale(weight)
    off = (layer.logits(ones).T / 127 - widened).abs() / scale.clamp(min=1e-9)
    assert off.max() < 1.001
    assert (off < 0.001).double().mean() > 0.97


@native
@pytest.mark.usefixtures("few")
def test_any_float_dtype_goes_in_and_comes_out():
    x, weight, bias = _problem(3, 64, 64, seed=4)
    layer = linear.PanelDense(weight.float(), bias.bfloat16())
    assert layer(x.float()).dtype == torch.float32
    # Columns of a wider tensor, as attention and fused projections return them.
    wide = torch.cat((x, x), dim=1)
    assert torch.equal(layer(wide[:, 64:]), layer(x))


@native
def test_memory_is_that_of_the_rounded_weights():
    weight = torch.randn(1024, 1024).bfloat16()
    plain = weight.nbytes
    assert linear.PanelDense(weight, None).num_bytes == plain
    assert linear.PanelInt8(weight, None).num_bytes <= plain * 0.51
    assert linear.PanelInt4(weight, None).num_bytes <= plain * 0.29


@native
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kind", [linear.PanelDense, linear.PanelInt8])
@pytest.mark.parametrize("rows", [1, 5, 33, 70])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.3, None), (1.0, 30.0), (0.7, 2.0)])
def test_the_likeliest_output_is_the_first_of_the_largest_logits(kind, rows, scale, cap):
    """After scaling and capping: the last cap makes many logits equal."""
    x, weight, bias = _problem(rows, 150, 96, seed=rows)
    weight[40:110] = weight[0:70].clone()  # many logits occur twice, in different panels
    bias[40:110] = bias[0:70].clone()
    layer = kind(weight, bias)
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        token_ids, is_finite = layer.sample_greedy(x, scale, cap)
        logits = layer.logits(x) * scale
        assert is_finite.all()
        assert torch.equal(
            token_ids, (logits if cap is None else layers.softcap(logits, cap)).argmax(1)
        )
    torch.set_num_threads(threads)


@native
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kind", [linear.PanelDense, linear.PanelInt8])
def test_a_row_without_finite_logits_is_told_and_harms_no_other(kind):
    x, weight, bias = _problem(6, 70, 64, seed=3)
    layer = kind(weight, bias)
    expected = layer.sample_greedy(x).token_ids
    x[1], x[4] = float("nan"), float("inf")
    token_ids, is_finite = layer.sample_greedy(x)
    good = [0, 2, 3, 5]
    assert is_finite.tolist() == [row in good for row in range(6)]
    assert torch.equal(token_ids[good], expected[good])


@native
def test_torch_and_these_ask_one_library_for_the_number_of_threads():
    maps = Path("/proc/self/maps").read_text()
    assert len(set(re.findall(r"\S*libgomp\S*", maps))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_moves_a_weight_by_half_a_step_at_most(dtype):
    weight = torch.randn(30, 128, generator=torch.Generator().manual_seed(5)).to(dtype)
    codes = quantise_int8(weight)
    moved = (codes.dequantise(torch.float64) - weight.double()).abs()
    assert (moved <= codes.scales.double() * 0.501).all()
    grouped = quantise_int4(weight, 32)
    moved = (grouped.dequantise(torch.float64) - weight.double()).abs().view(30, 4, 32)
    # The level opposite to the largest value is 7, not 8: there the error reaches a whole step.
    assert (moved <= grouped.scales.double().abs()[:, :, None] * 1.01).all()
    assert (moved <= grouped.scales.double().abs()[:, :, None] * 0.51).double().mean() > 0.97
    floats = quantise_fp8(weight)
    moved = (floats.dequantise(torch.float64) - weight.double()).abs()
    assert (moved <= weight.double().abs() * 2**-4 + floats.scales.double() * 2**-10).all()


def test_normal_floats_are_the_nearest_levels():
    weight = torch.randn(5, 100, generator=torch.Generator().manual_seed(6))
    packed = quantise_nf4(weight, 64)
    levels = torch.tensor(packed.levels)
    for n in range(5):
        for group in (slice(0, 64), slice(64, 100)):
            scale = float(packed.scales[n, group.start // 64])
            nearest = (weight[n, group, None] / scale - levels).abs().argmin(1)
            expected = levels[nearest] * scale
            torch.testing.assert_close(packed.dequantise(torch.float32)[n, group], expected)


@pytest.mark.parametrize("quantise", [quantise_int8, quantise_int4, quantise_nf4, quantise_fp8])
def test_weights_of_zeros_stay_zeros(quantise):
    zeros = torch.zeros(4, 64)
    assert not quantise(zeros).dequantise(torch.float32).any()
    assert not linear_packed(torch.randn(2, 64), quantise(zeros), None).any()


def test_without_a_compiler_there_is_no_library_and_the_log_says_so(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(build, "_select_target", lambda: build._Target("any", "x86_64", (), ()))
    monkeypatch.setattr(build, "open_library", build.open_library.__wrapped__)
    monkeypatch.setattr(build, "_HERE", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level("INFO"):
        assert build.load.__wrapped__() is None
    assert "no C++ compiler" in caplog.text


def test_a_compiler_that_fails_is_told_in_one_line(monkeypatch, tmp_path):
    (tmp_path / "broken.cpp").write_text("int f( {\n")
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'broken.cpp:1: error: expected' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "_HERE", tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(build.BuildError, match="error: expected") as raised:
        build.compile_into(tmp_path / "cache", build._Target("any", "x86_64", (), ()))
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "cache").iterdir())


def test_a_processor_without_the_instructions_is_refused(monkeypatch):
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "_processor_flags", lambda: {"avx2", "sse2"})
    with pytest.raises(build.BuildError, match="lacks fma"):
        build.library_path()
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    with pytest.raises(build.BuildError, match="lacks a kernel of its kind"):
        build.library_path()


@native
def test_the_bench_prints_ceilings_and_ends_in_json(capsys, monkeypatch):
    monkeypatch.setattr(bench, "_SHAPES", ((64, 96), (96, 64)))
    monkeypatch.setattr(bench, "_READ_BYTES", 2**20)
    monkeypatch.setattr(bench, "_MATMUL_SIZE", 64)
    assert bench.main(["--rows", "1,3", "--layers", "1"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["read_gb_s"] > 0
    measured = {(result["weights"], result["rows"]) for result in told["results"]}
    kinds = ("float32", "torch", "bf16", "int8", "int4")
    assert measured == {(kind, n) for kind in kinds for n in (1, 3)}


def test_memory_of_weights_is_aligned_and_each_has_its_own():
    arena = Arena()
    shapes = ((3, 5), (1,), (2**20,), (70 * 2**20,), (7, 7), (0, 4))
    tensors = [arena.empty(shape, torch.int8).fill_(i) for i, shape in enumerate(shapes)]
    for i, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert tensor.data_ptr() % 64 == 0
        assert (tensor == i).all()
    assert arena.empty((9,), torch.float32).data_ptr() % 64 == 0


def test_a_tensor_with_pages_of_its_own_gives_them_back():
    def mapped_kb() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * 4

    before = mapped_kb()
    tensor = mapped_zeros((300, 2**20), torch.int8)
    assert not tensor[::50, ::99].any()
    assert mapped_kb() > before + 250 * 1024
    del tensor
    assert mapped_kb() < before + 50 * 1024
    assert mapped_zeros((0, 3), torch.bfloat16).shape == (0, 3)

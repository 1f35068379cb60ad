"""Few-row products with their norms, gates and sums equal the reference and their parts."""

from __future__ import annotations

import pytest
import torch

from kernels.packed import PackedParts, PackedWeight
from kernels.reference.skinny import skinny_linear as reference_linear
from kernels.skinny import GateKind, RowNorm
from kernels.tiled import tile, tile_experts
from kernels.triton.layers import gelu_mul, silu_mul
from kernels.triton.skinny import skinny_linear
from kernels.triton.skinny_packed import skinny_packed_linear
from tests.kernels.packed_weights import KINDS, packed_weight

SHAPES = [(1, 64, 130), (3, 100, 70), (4, 1500, 12), (2, 3, 5), (1, 2100, 40)]
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3}


@pytest.mark.parametrize("is_widened", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_products_equal_the_twins(
    rows: int,
    inputs: int,
    outputs: int,
    is_normed: bool,
    gate: GateKind | None,
    dtype: torch.dtype,
    is_widened: bool,
) -> None:
    """Of one bias and none, one gives results in float32, the other as the inputs are."""
    random = torch.Generator().manual_seed(rows * inputs)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    made = outputs if gate is None else 2 * outputs
    # Rows of a wider tensor: the gaps between them must not be read.
    x = torch.cat((noise(rows, inputs), torch.full((rows, 5), float("nan")).to(dtype)), dim=1)
    weight, norm = noise(made, inputs) / inputs**0.5, RowNorm(noise(inputs), 1e-5)
    given = {"norm": norm if is_normed else None, "gate": gate}
    for bias in (None, noise(made)):
        wanted = torch.float32 if is_widened == (bias is None) else None
        torch.testing.assert_close(
            skinny_linear(x[:, :inputs], weight, bias, dtype=wanted, **given),
            reference_linear(x[:, :inputs], weight, bias, dtype=wanted, **given),
            rtol=TOLERANCES[dtype],
            atol=TOLERANCES[dtype],
        )


@pytest.mark.parametrize("is_normed", [False, True])
def test_a_stream_is_added_to_where_it_lies(is_normed: bool) -> None:
    random = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 70, generator=random) for n in (3, 50))
    norm = RowNorm(torch.rand(70, generator=random), 1e-6) if is_normed else None
    stream = torch.randn(3, 50, generator=random)
    expected = stream + reference_linear(x, weight, norm=norm)
    assert skinny_linear(x, weight, norm=norm, stream=stream) is stream
    torch.testing.assert_close(stream, expected)


def test_gated_products_are_rounded_as_if_they_were_read() -> None:
    """To the last bit: the text of a model must not depend on where gating happens."""
    random = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(n, 64, generator=random).half() for n in (2, 96))
    for gate, apart in (("silu", silu_mul), ("gelu_tanh", gelu_mul)):
        whole = skinny_linear(x, weight, gate=gate)
        assert torch.equal(whole, apart(skinny_linear(x, weight)))


def test_a_row_has_the_same_bits_beside_others() -> None:
    random = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, 300, generator=random).half() for n in (4, 40))
    whole = skinny_linear(x, weight)
    for begin, end in ((0, 1), (1, 4), (2, 3), (3, 3)):
        assert torch.equal(skinny_linear(x[begin:end], weight), whole[begin:end])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("inputs", "group", "is_whole"),
    [
        *((128, 32, True), (176, 16, False)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((128, 32, False), (192, 64, True), (192, 64, False)),
                *((100, 100, False), (100, 100, True), (176, 16, True)),
                *((2080, 32, False), (2080, 32, True)),
            )
        ),
    ],
)
def test_products_of_codes_equal_the_twins(
    kind: str, inputs: int, group: int, is_whole: bool
) -> None:
    """With zeros and an order of the inputs, and without."""
    random = torch.Generator().manual_seed(inputs)
    weight = tile(packed_weight(kind, 52, inputs, group, zeros=is_whole, order=is_whole))
    dense = weight.matrix(0, torch.float32)
    x, norm = torch.randn(3, inputs, generator=random), torch.rand(inputs, generator=random)
    bias, stream = (torch.randn(n, generator=random) for n in ((52,), (3, 52)))
    for rows in (1, 3):
        for given in (
            {"bias": bias, "norm": RowNorm(norm, 1e-5)},
            {"norm": RowNorm(norm, 1e-5), "gate": "silu"},
            {"stream": stream[:rows]},
        ):
            added = {"stream": stream[:rows].clone()} if "stream" in given else {}
            expected = reference_linear(x[:rows], dense, **(given | added))
            added = {"stream": stream[:rows].clone()} if "stream" in given else {}
            actual = skinny_packed_linear(x[:rows], weight, **(given | added))
            assert (actual - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("kind", ["int4", "e4m3"])
def test_products_of_codes_in_low_precision(kind: str) -> None:
    random = torch.Generator().manual_seed(4)
    weight = tile(packed_weight(kind, 70, 256, 128))
    x = torch.randn(2, 256, generator=random).half()
    expected = reference_linear(x, weight.matrix(0, torch.float32))
    actual = skinny_packed_linear(x, weight)
    assert actual.dtype == torch.float16
    assert (actual.float() - expected.float()).norm() < 2e-3 * expected.float().norm()


def test_scales_that_are_exponents() -> None:
    packed = packed_weight("e2m1", 40, 96, 32)
    random = torch.Generator().manual_seed(5)
    scales = torch.ldexp(torch.ones(40, 3), torch.randint(-9, 3, (40, 3), generator=random))
    weight = tile(PackedWeight(packed.codes, scales, 96, 32, packed.levels))
    assert weight.scales.dtype == torch.uint8
    x = torch.randn(1, 96, generator=random)
    expected = reference_linear(x, weight.matrix(0, torch.float32))
    assert (skinny_packed_linear(x, weight) - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("kind", [None, "e2m1", "int4"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_each_pair_of_token_and_expert_is_a_row(kind: str | None, is_whole: bool) -> None:
    """With everything that a product may fuse, and without; with codes and their orders."""
    random = torch.Generator().manual_seed(6)
    x, dense = torch.randn(3, 96, generator=random), torch.randn(5, 40, 96, generator=random) / 10
    weight = dense
    if kind is not None:
        packed = packed_weight(kind, 200, 96, 32, zeros=is_whole, order=False)
        weight = tile_experts(PackedParts((packed,)), 5)
        dense = torch.stack([weight.matrix(expert, torch.float32) for expert in range(5)])
    product = skinny_linear if kind is None else skinny_packed_linear
    experts = torch.tensor([[4, 0], [1, 4], [3, 2]])
    norm, bias = torch.rand(96, generator=random), torch.randn(5, 40, generator=random)
    along = {"norm": RowNorm(norm, 1e-5), "gate": "silu"} if is_whole else {}
    for rows, chosen in (
        (x, experts),
        (x[:1], experts[:1]),
        (x, experts[:, 1:]),
        (x[:0], experts[:0]),
    ):
        chosen = chosen.contiguous()
        expected = reference_linear(rows, dense, bias, experts=chosen, **along)
        actual = product(rows, weight, bias, experts=chosen, **along)
        assert actual.shape == (chosen.numel(), 20 if is_whole else 40)
        assert (actual - expected).norm() <= 1e-5 * expected.norm()

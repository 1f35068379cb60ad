"""Experts in codes that are widened to memory, slice by slice, for many rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels.moe import ExpertTensors
from kernels.packed import PackedParts
from kernels.reference.moe import clamped_swiglu
from kernels.reference.moe import fused_moe as reference_moe
from kernels.tiled import TiledWeight, tile_experts
from kernels.triton import grouped, widening
from kernels.triton.moe import fused_moe, invariant_moe
from kernels.triton.widening import (
    MAX_PACKED_TILE_ROWS,
    lines_at_once,
    matrices_at_once,
    widen_lines,
)
from tests.kernels.packed_weights import KINDS, packed_weight

_ACTIVATE = partial(clamped_swiglu, alpha=1.702, limit=3.0)


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Returns the first line and the number of lines of each launch; memory is not zero before."""
    monkeypatch.setattr(widening, "_TILES", 1)  # the interpreter computes the same ones again
    seen = []

    def widen(
        dense: torch.Tensor, weight: TiledWeight, first: int, starts: torch.Tensor | None = None
    ) -> None:
        seen.append((first, dense.shape[0]))
        widen_lines(dense.fill_(float("nan")), weight, first, starts)

    monkeypatch.setattr(grouped, "widen_lines", widen)
    return seen


def _stack(
    kind: str, experts: int, outputs: int, inputs: int, *, group: int = 32, form: str = "plain"
) -> TiledWeight:
    extras = form == "zeros", form == "orders"
    parts = [
        packed_weight(
            kind, outputs, inputs, min(group, inputs), zeros=extras[0], order=extras[1], seed=expert
        )
        for expert in range(experts)
    ]
    if form == "exponents":
        exponents = (torch.randint(-9, 0, part.scales.shape) for part in parts)
        parts = [
            replace(part, scales=torch.exp2(each))
            for part, each in zip(parts, exponents, strict=True)
        ]
    return tile_experts(PackedParts(tuple(parts)), experts)


def _close(
    stacks: tuple[TiledWeight, TiledWeight],
    chosen: torch.Tensor,
    *,
    biased: bool = False,
    some_elsewhere: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    random = torch.Generator().manual_seed(len(chosen))
    x = torch.randn(len(chosen), stacks[0].inputs, generator=random).to(dtype)
    shares = torch.rand(chosen.shape, generator=random)
    biases: tuple[torch.Tensor, ...] = ()
    if biased:
        shapes = ((part.num_matrices, part.outputs) for part in stacks)
        biases = tuple(torch.randn(shape, generator=random).to(dtype) for shape in shapes)
    how = _ACTIVATE, False, some_elsewhere
    actual = fused_moe(x, ExpertTensors(*stacks, *biases), chosen, shares, *how).double()
    exact = ExpertTensors(*stacks, *(bias.double() for bias in biases))
    expected = reference_moe(x.double(), exact, chosen, shares, *how)
    assert actual.isfinite().all()
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert float((actual - expected).norm() / expected.norm()) < limit


def _choices(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, experts, generator=random).argsort(dim=1)[:, :top_k]


def test_many_rows_of_an_expert_are_widened(widened: list[tuple[int, int]]) -> None:
    """As many as in a prompt; one row less for each expert, on average, is not."""
    stacks = _stack("e2m1", 2, 192, 96, form="exponents"), _stack("e2m1", 2, 96, 96)
    chosen = (torch.arange(2 * (MAX_PACKED_TILE_ROWS + 1)) % 2)[:, None]
    _close(stacks, chosen, biased=True)
    assert widened == [(0, 384), (0, 192)]
    widened.clear()
    _close(stacks, chosen[2:])
    assert not widened


@pytest.mark.parametrize(
    ("kind", "group", "form"),
    [
        ("e2m1", 32, "exponents"),
        ("int4", 32, "zeros"),
        ("int8", 80, "zeros"),
        ("e4m3", 80, "plain"),
        *(pytest.param(kind, 32, "plain", marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_slices_of_experts_equal_the_loop(
    monkeypatch: pytest.MonkeyPatch,
    widened: list[tuple[int, int]],
    kind: str,
    group: int,
    form: str,
) -> None:
    """Five experts in three slices, two by two; outputs that end amid a program's lines."""
    monkeypatch.setattr(grouped, "MAX_PACKED_TILE_ROWS", 0)
    monkeypatch.setattr(widening, "MAX_WIDENED_BYTES", 2 * 4 * 80 * 80)
    stacks = (
        _stack(kind, 5, 80, 80, group=group, form=form),
        _stack(kind, 5, 80, 40, group=group, form=form),
    )
    _close(stacks, _choices(7, 5, 2), biased=True)
    assert widened == [(0, 160), (160, 160), (320, 80), (0, 240), (240, 160)]


@pytest.mark.parametrize("which", ["one", "last", "none", "elsewhere"])
def test_whatever_experts_the_tokens_chose(
    monkeypatch: pytest.MonkeyPatch, widened: list[tuple[int, int]], which: str
) -> None:
    """All the tiles are of one slice, which has a third of the programs; or some are of none."""
    tokens = 6 * MAX_PACKED_TILE_ROWS + 6
    monkeypatch.setattr(widening, "MAX_WIDENED_BYTES", 4 * 64 * 48)
    stacks = _stack("int4", 3, 64, 48, form="zeros"), _stack("e2m1", 3, 48, 32, form="exponents")
    chosen = torch.full((tokens, 1), {"one": 0, "last": 2}.get(which, 3))
    if which == "elsewhere":
        chosen[::3] = 1
    if which == "none":
        x, shares = torch.randn(tokens, 48), torch.ones(tokens, 1)
        assert not fused_moe(x, ExpertTensors(*stacks), chosen, shares, None, False, True).any()
    else:
        _close(stacks, chosen, biased=True, some_elsewhere=which == "elsewhere")
    assert widened[:3] == [(0, 64), (64, 64), (128, 64)]


def test_experts_without_rows_are_left_out() -> None:
    """Of a slice without the first expert; lines of a program may be of two."""
    weight = _stack("int4", 4, 48, 32)
    dense = torch.full((3 * 48, 32), float("nan"))
    widen_lines(dense, weight, 48, torch.tensor([0, 9, 9, 9, 12], dtype=torch.int32))
    left, made = dense.split((2 * 48, 48))
    assert left.isnan().all()
    torch.testing.assert_close(made, weight.matrix(3, torch.float32))
    widen_lines(dense, weight, 48, torch.tensor([0, 9, 12, 12, 12], dtype=torch.int32))
    made, shared, left = dense[:96].split((48, 16, 32))
    torch.testing.assert_close(made, weight.matrix(1, torch.float32))
    torch.testing.assert_close(shared, weight.matrix(2, torch.float32)[:16])
    assert left.isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_experts_as_wide_as_gpt_osss(
    monkeypatch: pytest.MonkeyPatch, widened: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    """2880 inputs are 22 tiles of codes and a half."""
    monkeypatch.setattr(widening, "MAX_WIDENED_BYTES", 2 * 2 * 64 * 2880)
    stacks = (
        _stack("e2m1", 3, 64, 2880, form="exponents"),
        _stack("e2m1", 3, 2880, 32, form="exponents"),
    )
    _close(stacks, _choices(MAX_PACKED_TILE_ROWS + 40, 3, 2), biased=True, dtype=dtype)
    assert len(widened) == 3


def test_experts_with_orders_of_their_own_are_not_widened(widened: list[tuple[int, int]]) -> None:
    stacks = (_stack("int4", 2, 64, 64, form="orders"), _stack("int4", 2, 64, 32, form="orders"))
    _close(stacks, _choices(2 * MAX_PACKED_TILE_ROWS, 2, 2))
    assert not widened


def test_batch_invariant_experts_are_not_widened(widened: list[tuple[int, int]]) -> None:
    stacks = _stack("e2m1", 2, 64, 32, form="exponents"), _stack("e2m1", 2, 32, 32)
    chosen = _choices(2 * MAX_PACKED_TILE_ROWS, 2, 2)
    given = torch.randn(len(chosen), 32), ExpertTensors(*stacks), chosen, torch.ones(chosen.shape)
    compute: Callable[..., torch.Tensor] = invariant_moe
    assert compute(*given).isfinite().all()
    assert not widened


def test_parts_are_bounded_and_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that does not fit is widened alone; five of which four fit are three and two."""
    weight = _stack("int4", 5, 64, 32)
    for bound, lines, matrices in ((1, 1, 1), (2 * 32 * 64, 64, 1), (2 * 32 * 64 * 4, 64, 3)):
        monkeypatch.setattr(widening, "MAX_WIDENED_BYTES", bound)
        assert lines_at_once(weight, torch.bfloat16) == lines
        assert matrices_at_once(weight, torch.bfloat16) == matrices

"""The head that reads half of its weight returns the same token as the full product."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import linear
from kernels.cpu.layers import softcap
from kernels.cpu.screened import ScreenedHead
from tests.kernels import cpu_targets

pytestmark = pytest.mark.skipif(not linear.is_available(), reason="no native linear layers here")
_SHAPES = ((1000, 96), (3072, 256), (777, 896), (40, 32))  # outputs, inputs
_AS_AT_FIRST = [0, 1]  # patience, unchanged by any failed attempt


@pytest.fixture(params=cpu_targets.WAYS)
def make(request, monkeypatch):
    """Makes a head and the plain layer of the same weight, for each kernel path.

    Any number of rows is screened: where that does not pay off, the result is still right.
    """
    cpu_targets.use(request.param, monkeypatch)

    def heads(weight: torch.Tensor) -> tuple[ScreenedHead, linear.PanelDense]:
        head = ScreenedHead(weight)
        head._max_rows = 10**6
        return head, linear.PanelDense(weight, None)

    return heads


@pytest.fixture(params=[4, 30], ids=["two digits", "one digit"])
def rows(request) -> int:
    """Few enough for activations with two digits, and enough for one digit."""
    return request.param


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _same(
    head: ScreenedHead,
    plain: linear.PanelDense,
    x: torch.Tensor,
    scale: float = 1.0,
    cap: float | None = None,
) -> bool:
    found, expected = head.sample_greedy(x, scale, cap), plain.logits(x) * scale
    if cap is not None:
        softcap(expected, cap)
    assert found.is_finite.all()
    return torch.equal(found.token_ids, expected.argmax(1))


@pytest.mark.parametrize(("outputs", "inputs"), _SHAPES)
def test_the_token_is_that_of_the_whole_product(make, outputs, inputs):
    weight = _normal(outputs, inputs, seed=outputs)
    weight[: outputs // 2] *= 0.3  # like the rows of rare tokens
    head, plain = make(weight)
    for seed in range(40):
        x = _normal(seed % 8 + 1 if seed < 20 else 3 * seed, inputs, seed=seed)
        x[0, :3] *= 50  # like the activations of trained models
        assert _same(head, plain, x)


@pytest.mark.parametrize(("scale", "cap"), [(0.3, None), (7.0, None), (1.0, 30.0), (0.0625, 4.0)])
def test_scores_that_are_scaled_and_capped(make, rows, scale, cap):
    weight = _normal(3072, 256, seed=20)
    weight[:1500] *= 0.3
    head, plain = make(weight)
    for seed in range(20):
        x = 0.5 * _normal(rows, 256, seed=seed)
        assert _same(head, plain, x, scale, cap)
    if rows == 4:  # by screening: one digit leaves too many of so few panels open
        assert head._backoff.tolist() == _AS_AT_FIRST


@pytest.mark.parametrize("cap", [0.5, 4.0, 10.0])
def test_scores_that_a_cap_makes_equal(make, rows, cap):
    """Of many logits at the cap the first is chosen, not the one that was the largest before."""
    weight = _normal(3072, 256, seed=21)
    head, plain = make(weight)
    num_moved = 0
    for seed in range(12):
        x = _normal(rows, 256, seed=seed)
        assert _same(head, plain, x, 1.0, cap)
        num_moved += int(
            (head.sample_greedy(x, 1.0, cap).token_ids != plain.sample_greedy(x).token_ids).sum()
        )
    assert num_moved or cap == 10.0


def test_close_scores_that_a_cap_brings_closer(make, rows):
    close = _normal(1, 256, seed=1) + 2**-7 * _normal(40, 256, seed=2)
    weight = torch.cat((0.2 * _normal(3000, 256, seed=3), close)).bfloat16()
    head, plain = make(weight)
    for seed in range(30):
        x = (weight[-1:].float() / 8 + 0.02 * _normal(rows, 256, seed=seed)).bfloat16()
        assert _same(head, plain, x, 1.0, 30.0)
        assert _same(head, plain, x, 1.0, 12.0)


def test_codes_alone_would_be_wrong_where_it_is_right(make, rows):
    """Outputs that differ by less than their rounding: the exact product has to decide."""
    close = _normal(1, 256, seed=1) + 2**-7 * _normal(40, 256, seed=2)
    weight = torch.cat((close, 0.2 * _normal(3000, 256, seed=3))).bfloat16()
    head, plain = make(weight)
    codes = linear.PanelInt8(weight, None)
    num_wrong = 0
    for seed in range(30):
        x = (weight[:1].float() + 0.2 * _normal(rows, 256, seed=seed)).bfloat16()
        assert _same(head, plain, x)
        num_wrong += int((codes.sample_greedy(x).token_ids != plain.logits(x).argmax(1)).sum())
    assert num_wrong > 10
    assert head._backoff.tolist() == _AS_AT_FIRST  # by screening


def test_of_equal_scores_the_first_token_is_taken(make, rows):
    weight = _normal(2000, 64, seed=4)
    weight[1500:1600] = weight[100:200]
    head, plain = make(weight)
    for seed in range(20):
        assert _same(head, plain, _normal(rows, 64, seed=seed))


def test_where_codes_tell_nothing_apart_the_product_is_made(make, rows):
    """Nearly equal outputs everywhere: more and more calls skip the codes, and all are right."""
    weight = (_normal(1, 128, seed=5) + 2**-9 * _normal(4000, 128, seed=6)).bfloat16()
    head, plain = make(weight)
    for seed in range(12):
        assert _same(head, plain, _normal(rows, 128, seed=seed))
    assert head._backoff[1] > 1


@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_threads_and_rows_gives_the_same(make, threads):
    head, plain = make(_normal(3072, 256, seed=7))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert all(
            _same(head, plain, _normal(rows, 256, seed=rows)) for rows in (1, 7, 8, 9, 40, 200)
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("more", [0, 20])
def test_rows_that_are_not_finite_are_told_and_harm_no_other(make, more):
    head, plain = make(_normal(2000, 64, seed=8))
    x = _normal(5 + more, 64, seed=9)
    expected = plain.logits(x).argmax(1)
    x[1, 3], x[3, 60] = float("nan"), float("-inf")
    found = head.sample_greedy(x)
    assert found.is_finite.tolist() == [True, False, True, False, *[True] * (1 + more)]
    assert torch.equal(found.token_ids[::2], expected[::2])


def test_weights_that_are_not_finite_are_found(make, rows):
    weight = _normal(2000, 64, seed=10)
    weight[1234, 5] = float("inf")
    head, _ = make(weight)
    assert not head.sample_greedy(_normal(rows, 64, seed=11).abs()).is_finite.any()


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-20, 1e18, 1e37])
def test_activations_of_any_size_are_told_apart(make, rows, scale):
    head, plain = make(0.1 * _normal(2000, 64, seed=12))
    x = (_normal(rows, 64, seed=13).clamp(-2, 2).float() * scale).bfloat16()
    expected = plain.sample_greedy(x)
    found = head.sample_greedy(x)
    assert torch.equal(found.is_finite, expected.is_finite)
    assert torch.equal(found.token_ids, expected.token_ids)


def test_its_memory_is_told():
    weight = _normal(4096, 512, seed=14)
    plain, head = linear.PanelDense(weight, None), ScreenedHead(weight)
    assert 1.5 * plain.num_bytes < head.num_bytes < 1.52 * plain.num_bytes

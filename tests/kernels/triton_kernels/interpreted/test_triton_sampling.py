"""The sampling kernels give the same tokens as the reference, which sorts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kernels.reference.sampling import exponential_noise
from kernels.reference.sampling_step import position_keys
from kernels.triton import noise, truncation
from kernels.triton.sampling import sample
from kernels.triton.truncation import CHUNK, TILE_CHUNKS
from tests.kernels.sampling_cases import (
    SLOTS,
    check,
    check_overflows,
    make_extras,
    make_table,
)


@pytest.mark.parametrize("vocab", [7, 4097])
def test_greedy_takes_the_first_of_equals(vocab: int) -> None:
    random = torch.Generator().manual_seed(vocab)
    logits = torch.randint(0, 5, (SLOTS, vocab), generator=random).float()
    tokens = check(sample, random, logits, make_table(random))
    assert logits.gather(1, tokens[:, None]).squeeze(1).equal(logits.amax(dim=1))


@pytest.mark.parametrize(
    ("kind", "vocab", "spread"),
    [
        ("temperature", 33, 4.0),
        ("top_k", 4097, 0.1),
        ("top_k", 33, 4.0),
        ("top_p", 33, 0.1),
        ("top_p", 4097, 4.0),
        ("min_p", 33, 4.0),
        ("all", 33, 0.1),
        ("all", 8200, 4.0),
    ],
)
def test_draws_equal_those_of_sorting(kind: str, vocab: int, spread: float) -> None:
    random = torch.Generator().manual_seed(vocab)
    columns = {"temperature": torch.rand(SLOTS, generator=random) + 0.3}
    columns["temperature"][0] = 0.0
    if kind in ("top_k", "all"):
        top_k = torch.tensor([20, 2, 1, 7, vocab - 1, 0])
        columns["top_k"] = top_k.to(torch.int32)
    if kind in ("top_p", "all"):
        columns["top_p"] = torch.linspace(0.0, 1.0, SLOTS).roll(2)
    if kind in ("min_p", "all"):
        columns["min_p"] = torch.linspace(0.0, 0.5, SLOTS)
    logits = torch.randn(SLOTS, vocab, generator=random) * spread
    logits[3] = logits[3].round()  # many ties
    logits[4, 5:] = float("-inf")
    check(sample, random, logits, make_table(random, **columns))


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("top_k", [2, 3, 4, 9])
def test_a_search_ends_whatever_the_numbers(top_k: int) -> None:
    """Otherwise the kernel would hang the device.

    Between neighbouring floats almost no range is left to search; the range from the smallest to
    the largest float overflows.
    """
    random, vocab = torch.Generator().manual_seed(top_k), 33
    five, zero = (torch.tensor(float(number)) for number in (5, 0))
    rows = (
        (five, five.nextafter(2 * five), 7.0),
        (five.nextafter(zero), five, 5.0),
        (zero, zero.nextafter(five), 1.0),
        (-3.4e38, 3.3e38, 3.4e38),
        (5.0, 5.0, 7.0),
        (-3.4e38, 0.0, 1.0),
    )
    logits = torch.full((SLOTS, vocab), float("-inf"))
    logits[:, 10:13] = torch.tensor(rows)
    columns = {"temperature": torch.ones(SLOTS), "top_p": torch.full((SLOTS,), 0.999)}
    columns["top_k"] = torch.full((SLOTS,), top_k, dtype=torch.int32)
    check(sample, random, logits, make_table(random, **columns))


def test_penalties_bias_bans_and_grammar() -> None:
    random, vocab = torch.Generator().manual_seed(5), 4200
    table, extras = make_extras(random, vocab)
    check(sample, random, torch.randn(SLOTS, vocab, generator=random) * 3, table, extras)


def test_broken_rows_are_told_and_harm_no_other() -> None:
    random = torch.Generator().manual_seed(2)
    logits = torch.randn(SLOTS, 5000, generator=random)
    logits[0, 4990], logits[1, 0], logits[2] = float("nan"), float("inf"), float("-inf")
    table = make_table(random, top_k=torch.full((SLOTS,), 4, dtype=torch.int32))
    check(sample, random, logits, table._replace(temperature=torch.ones(SLOTS)))
    check(sample, random, logits, table)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("seed", range(15))
def test_any_rows_draw_as_by_sorting(seed: int) -> None:
    """Lists of one tile, of several and of all chunks; ties, few finite logits, any truncation."""
    random = torch.Generator().manual_seed(seed)

    def number(end: int) -> int:
        return int(torch.randint(end, (1,), generator=random))

    def shares() -> torch.Tensor:
        return torch.rand(SLOTS, generator=random)

    vocab = 1 + number((90, 3000, 9000)[seed % 3])
    logits = torch.randn(SLOTS, vocab, generator=random) * (0.0, 0.02, 1.0, 4.0, 30.0)[number(5)]
    if number(3) == 0:
        logits = logits.round()
    if number(3) == 0:
        logits[torch.rand(logits.shape, generator=random) < shares()[:, None]] = float("-inf")
    if number(4) == 0:
        logits[number(SLOTS), number(vocab) :] = float("-inf")
    columns = {"temperature": (shares() * 2).where(shares() < 0.7, torch.ones(SLOTS))}
    if number(4):
        ends = (4, 70, vocab + 2)
        columns["top_k"] = torch.randint(ends[number(3)], (SLOTS,), generator=random).int()
    if number(4):
        columns["top_p"] = (shares() * 1.3).clamp(max=1.0)
    if number(3) == 0:
        columns["min_p"] = shares() ** 3 * (shares() < 0.5)
    check(sample, random, logits, make_table(random, **columns))


@pytest.mark.parametrize(("top_k", "top_p"), [(32, 0.9), (33, 1.0), (100, 0.9), (200, 0.9)])
def test_likely_tokens_may_be_anywhere(top_k: int, top_p: float) -> None:
    """Each in a chunk of its own, or all in one: more chunks than a tile has, and fewer than k."""
    random, vocab = torch.Generator().manual_seed(top_k), 9001
    logits = torch.randn(SLOTS, vocab, generator=random)
    logits[0, ::CHUNK] += 20
    logits[1, 64 * 70 : 64 * 71] += 20
    logits[2] = float("-inf")
    logits[2, 5 : vocab : 3 * CHUNK] = 1.5  # fewer than fifty
    logits[3, ::40] = 7.0  # ties, which are all kept
    logits[4, -1] = 9.0
    columns = {"temperature": torch.ones(SLOTS), "top_p": torch.full((SLOTS,), top_p)}
    columns["top_k"] = torch.full((SLOTS,), top_k, dtype=torch.int32)
    check(sample, random, logits, make_table(random, **columns))


def test_a_nucleus_is_a_share_of_all_tokens() -> None:
    """Wherever in the vocabulary they are, and however unlike each other."""
    random, vocab = torch.Generator().manual_seed(8), 9001
    logits = torch.randn(SLOTS, vocab, generator=random) * 0.5
    logits[:, 2000:] -= 2
    logits[:, 7000:] -= 2
    columns = {"temperature": torch.ones(SLOTS), "top_p": torch.linspace(0.4, 0.6, SLOTS)}
    check(sample, random, logits, make_table(random, **columns))


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_rows_that_overflow_are_told_and_harm_no_other() -> None:
    check_overflows(sample)


def test_noise_is_that_of_the_reference() -> None:
    keys = position_keys(torch.tensor([5, -9]), torch.tensor([3, 2**40]))
    expected = exponential_noise(keys, _NUM_NOISE.value).log().neg()
    drawn = torch.empty_like(expected)
    _noise_kernel[(2,)](drawn, keys.view(torch.uint32))
    torch.testing.assert_close(drawn, expected, rtol=0, atol=1e-6)


_NUM_NOISE: tl.constexpr = tl.constexpr(2**15)


@triton.jit
def _noise_kernel(drawn: Any, keys: Any) -> None:
    row = tl.program_id(0)
    tokens = tl.arange(0, _NUM_NOISE)
    variates = noise.gumbel(tokens, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1))
    tl.store(drawn + row * _NUM_NOISE + tokens, variates)


@pytest.mark.parametrize("wanted", [1, 20, 31, 64, 200])
@pytest.mark.parametrize("num_finite", [190, 3000])
def test_few_chunks_are_searched(num_finite: int, wanted: int) -> None:
    random, num_maxima = torch.Generator().manual_seed(wanted), 3200
    maxima = torch.full((num_maxima,), float("-inf"))
    finite = torch.randperm(num_maxima, generator=random)[:num_finite]
    maxima[finite] = torch.randn(num_finite, generator=random)
    low, high = float(maxima[finite].min()) - 3, float(maxima.max())
    listed = torch.full((num_maxima,), -1, dtype=torch.int32)
    found, bound = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    _list_kernel[(1,)](maxima, listed, found, bound, wanted, low, high, num_maxima)
    count = int(found)
    expected = (maxima >= bound).nonzero().squeeze(1).int()
    assert torch.equal(listed[: len(expected)], expected)
    if wanted > num_finite:
        assert float(bound) == pytest.approx(low)
        assert len(expected) == num_finite
    else:
        tile = TILE_CHUNKS.value
        assert count == len(expected)
        assert wanted <= count <= -(-(wanted + wanted // 4) // tile) * tile


@triton.jit
def _list_kernel(
    maxima: Any,
    listed: Any,
    found: Any,
    bound_at: Any,
    wanted: Any,
    low: Any,
    high: Any,
    length: Any,
) -> None:
    bound = truncation.likely_bound(maxima, wanted, low, high, low, length)
    tl.store(bound_at, bound)
    tl.store(found, truncation.list_chunks(maxima, listed, bound, length))

"""The sampling kernels give the same tokens as the reference, which sorts."""

from __future__ import annotations

import pytest
import torch

from kernels.triton.sampling import sample
from tests.kernels.sampling_cases import SLOTS, check, make_extras, make_table


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

"""The sampling kernels give the tokens of their twin, which sorts."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import sampling_step as reference
from kernels.sampling import LogitBias, SamplingTable, TokenCounts
from kernels.triton.sampling import sample

SLOTS = 6


def make_table(random: torch.Generator, **columns: torch.Tensor) -> SamplingTable:
    """Plain greedy rows but for the columns given."""
    zeros, ones = torch.zeros(SLOTS), torch.ones(SLOTS)
    ints = torch.zeros(SLOTS, dtype=torch.int32)
    table = SamplingTable(
        temperature=zeros,
        top_k=ints,
        top_p=ones,
        min_p=zeros,
        presence=zeros,
        frequency=zeros,
        repetition=ones,
        seed=torch.randint(-(2**63), 2**63 - 1, (SLOTS,), generator=random),
        count_line=ints - 1,
        mask_line=ints - 1,
        bias_begin=ints,
        bias_end=ints,
    )
    return table._replace(**columns)


def check(logits: torch.Tensor, table: SamplingTable, **extras: object) -> torch.Tensor:
    """Both twins on the same rows, which come in a random order of slots."""
    random = torch.Generator().manual_seed(logits.shape[1])
    slots = torch.randperm(SLOTS, generator=random)[: logits.shape[0]].to(torch.int32)
    positions = torch.randint(0, 10_000, (logits.shape[0],), generator=random)
    expected = reference.sample(logits.clone(), slots, positions, table, **extras)
    sampled = sample(logits.clone(), slots, positions, table, **extras)
    assert torch.equal(sampled.is_finite, expected.is_finite)
    assert torch.equal(sampled.token_ids[sampled.is_finite], expected.token_ids[expected.is_finite])
    return sampled.token_ids


@pytest.mark.parametrize("vocab", [7, 4097])
def test_greedy_takes_the_first_of_equals(vocab: int) -> None:
    logits = torch.randint(0, 5, (SLOTS, vocab)).float()
    tokens = check(logits, make_table(torch.Generator()))
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
    logits[3] = logits[3].round()  # many equals
    logits[4, 5:] = float("-inf")
    check(logits, make_table(random, **columns))


def test_penalties_bias_bans_and_grammar() -> None:
    random, vocab = torch.Generator().manual_seed(5), 4200
    lines = 3
    counts = TokenCounts(
        torch.randint(0, 3, (lines, vocab), generator=random, dtype=torch.int32),
        torch.rand(lines, vocab, generator=random) < 0.3,
    )
    size = 200  # more than one tile of entries
    bias = LogitBias(
        token_ids=torch.randperm(vocab, generator=random)[:size].to(torch.int32),
        values=torch.randn(size, generator=random) * 10,
        until=torch.full((size,), 2**62),
    )
    bias.token_ids[5], bias.values[5] = bias.token_ids[4], float("-inf")  # biased and banned
    bias.values[100:110] = float("-inf")
    bias.until[100:110] = 5000
    masks = torch.randint(-(2**31), 2**31 - 1, (2, -(-vocab // 32)), generator=random)
    table = make_table(
        random,
        temperature=(torch.arange(SLOTS) % 3).float() * 0.5,
        top_p=torch.full((SLOTS,), 0.9),
        presence=torch.randn(SLOTS, generator=random),
        frequency=torch.randn(SLOTS, generator=random),
        repetition=torch.rand(SLOTS, generator=random) + 0.5,
        count_line=torch.randint(-1, lines, (SLOTS,), generator=random, dtype=torch.int32),
        mask_line=torch.randint(-1, 2, (SLOTS,), generator=random, dtype=torch.int32),
        bias_begin=torch.tensor([0, 100] * 3, dtype=torch.int32),
        bias_end=torch.tensor([size, 110] * 3, dtype=torch.int32),
    )
    logits = torch.randn(SLOTS, vocab, generator=random) * 3
    check(logits, table, counts=counts, bias=bias, masks=masks.to(torch.int32))


def test_broken_rows_are_told_and_harm_no_other() -> None:
    logits = torch.randn(SLOTS, 5000)
    logits[0, 4990], logits[1, 0], logits[2] = float("nan"), float("inf"), float("-inf")
    table = make_table(torch.Generator(), top_k=torch.full((SLOTS,), 4, dtype=torch.int32))
    check(logits, table._replace(temperature=torch.ones(SLOTS)))
    check(logits, table)

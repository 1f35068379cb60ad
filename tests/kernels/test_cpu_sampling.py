"""The CPU's sampling step gives the same tokens as the reference, which sorts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.native import build
from kernels.cpu.sampling import candidates, sample
from kernels.reference.sampling_step import candidates as reference_candidates
from kernels.reference.sampling_step import sample as reference_sample
from kernels.sampling import LogitBias, TokenCounts
from tests.kernels.sampling_cases import (
    SLOTS,
    check,
    check_overflows,
    make_extras,
    make_table,
)

pytestmark = pytest.mark.skipif(build.load() is None, reason="no native kernels here")


@given(
    vocab=st.integers(1, 9000),
    spread=st.sampled_from([0.05, 1.0, 4.0, 20.0]),
    cuts=st.sets(st.sampled_from(["top_k", "top_p", "min_p"])),
    is_coarse=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_draws_equal_those_of_sorting(
    vocab: int, spread: float, cuts: set[str], is_coarse: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    columns = {"temperature": torch.rand(SLOTS, generator=random) + 0.3}
    columns["temperature"][0] = 0.0
    if "top_k" in cuts:
        top_k = torch.randint(0, 2 * vocab, (SLOTS,), generator=random)
        top_k[:3] = top_k[:3] % 40
        columns["top_k"] = top_k.to(torch.int32)
    if "top_p" in cuts:
        columns["top_p"] = torch.rand(SLOTS, generator=random)
        columns["top_p"][1:3] = torch.tensor([0.0, 1.0])
    if "min_p" in cuts:
        columns["min_p"] = torch.rand(SLOTS, generator=random) * 0.5
    logits = torch.randn(SLOTS, vocab, generator=random) * spread
    if is_coarse:
        logits = logits.round()  # many ties
    logits[4, 5:] = float("-inf")
    check(sample, random, logits, make_table(random, **columns))


def test_greedy_takes_the_first_of_equals() -> None:
    random = torch.Generator().manual_seed(1)
    for vocab in (1, 15, 4097):
        logits = torch.randint(0, 5, (SLOTS, vocab), generator=random).float()
        check(sample, random, logits, make_table(random))


def test_penalties_bias_bans_and_grammar() -> None:
    random, vocab = torch.Generator().manual_seed(5), 4200
    table, extras = make_extras(random, vocab)
    for _ in range(10):
        logits = torch.randn(SLOTS, vocab, generator=random) * 3
        check(sample, random, logits, table, extras)


def test_broken_rows_are_told_and_harm_no_other() -> None:
    random = torch.Generator().manual_seed(2)
    logits = torch.randn(SLOTS, 5000, generator=random)
    logits[0, 4990], logits[1, 0], logits[2] = float("nan"), float("inf"), float("-inf")
    table = make_table(random, top_k=torch.full((SLOTS,), 4, dtype=torch.int32))
    check(sample, random, logits, table._replace(temperature=torch.ones(SLOTS)))
    check(sample, random, logits, table)


def test_rows_that_overflow_are_told_and_harm_no_other() -> None:
    check_overflows(sample)


@given(
    vocab=st.integers(1, 3000),
    spread=st.sampled_from([0.05, 1.0, 20.0]),
    share=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    extras=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=80, deadline=None)
def test_the_first_candidate_that_a_mask_allows_is_chosen_under_it(
    vocab: int, spread: float, share: float, extras: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(SLOTS, vocab, generator=random) * spread
    logits[1] = logits[1].round()  # many ties
    logits[2, 3:] = float("-inf")
    logits[3, vocab // 2] = float("nan")
    bits = torch.rand(SLOTS, -(-vocab // 32) * 32, generator=random) < share
    bits[4:] = False
    bits[4, vocab - 1] = True  # a single allowed token
    bits[:, vocab:] = False
    masks = (bits.view(SLOTS, -1, 32).long() << torch.arange(32)).sum(-1).to(torch.int32)
    ints = torch.arange(SLOTS, dtype=torch.int32)
    table = make_table(
        random, temperature=torch.tensor([0.0, 1.0, 0.7, 1.0, 1.3, 0.0]), mask_line=ints
    )
    counts = bias = None
    if extras:
        table = table._replace(
            repetition=torch.full((SLOTS,), 1.5), count_line=ints, bias_end=ints.clamp(max=1)
        )
        counts = TokenCounts(
            torch.randint(0, 2, (SLOTS, vocab), generator=random, dtype=torch.int32),
            torch.rand(SLOTS, vocab, generator=random) < 0.3,
        )
        bias = LogitBias(ints[:1].clone(), torch.tensor([2.0]), torch.tensor([2**62]))
    positions = torch.randint(0, 10_000, (SLOTS,), generator=random)
    kept = logits.clone()
    given = (logits, torch.arange(SLOTS), ints, positions, table, 8, counts, bias)
    found = candidates(*given)
    assert torch.equal(found, reference_candidates(*given))
    assert torch.equal(logits.nan_to_num(9), kept.nan_to_num(9))
    assert (found[3] == -1).all()
    for step in (sample, reference_sample):
        sampled = step(logits.clone(), ints, positions, table, counts, bias, masks)
        for row in range(SLOTS):
            allowed = [token for token in found[row].tolist() if token >= 0 and bits[row, token]]
            if allowed:
                assert sampled.is_finite[row]
                assert sampled.token_ids[row] == allowed[0]

"""The kernels that verify drafts give the same results as the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import drafts as reference
from kernels.reference import sampling_step
from kernels.sampling import SamplingTable
from kernels.triton.distribution import distribution
from kernels.triton.drafts import accept_drafts, sample_from_probs, verify_drafts
from tests.kernels.sampling_cases import SLOTS, Extras, make_extras, make_table


@pytest.mark.parametrize("num_groups", [1, 5, 70])
def test_drafts_are_kept_up_to_the_first_that_is_refused(num_groups: int) -> None:
    random = torch.Generator().manual_seed(num_groups)
    sizes = torch.randint(1, 40, (num_groups,), generator=random, dtype=torch.int32)
    total = int(sizes.sum())
    slots = torch.randperm(num_groups, generator=random).to(torch.int32)
    of_token = slots.repeat_interleave(sizes)
    token_ids = torch.randint(0, 2**17, (total,), generator=random)
    is_kept = torch.rand(total, generator=random) < 0.9
    newest = torch.full((num_groups + 1,), -1)
    kept = newest.clone()
    expected = reference.accept_drafts(newest, of_token, token_ids, is_kept, sizes)
    assert torch.equal(accept_drafts(kept, of_token, token_ids, is_kept, sizes), expected)
    assert torch.equal(kept, newest)


def check_distribution(
    logits: torch.Tensor,
    table: SamplingTable,
    extras: Extras | tuple[None, None, None] = (None, None, None),
) -> None:
    slots, positions = torch.arange(SLOTS - 1, -1, -1).to(torch.int32), torch.arange(SLOTS) * 11
    counts, bias, masks = extras
    given = slots, positions, table, counts, bias, masks
    expected = sampling_step.distribution(logits.clone(), *given)
    shares = distribution(logits.clone(), *given)
    torch.testing.assert_close(shares, expected, rtol=2e-5, atol=1e-9)
    assert torch.equal(shares > 0, expected > 0)


@pytest.mark.parametrize(("vocab", "spread"), [(33, 4.0), (4097, 0.1), (8200, 4.0)])
@pytest.mark.parametrize("kind", ["temperature", "top_k", "top_p", "min_p", "all"])
def test_shares_are_those_of_sorting(kind: str, vocab: int, spread: float) -> None:
    random = torch.Generator().manual_seed(vocab)
    columns = {"temperature": torch.rand(SLOTS, generator=random) + 0.3}
    columns["temperature"][0] = 0.0
    if kind in ("top_k", "all"):
        columns["top_k"] = torch.tensor([20, 2, 1, 7, vocab - 1, 0]).to(torch.int32)
    if kind in ("top_p", "all"):
        columns["top_p"] = torch.linspace(0.0, 1.0, SLOTS).roll(2)
    if kind in ("min_p", "all"):
        columns["min_p"] = torch.linspace(0.0, 0.5, SLOTS)
    logits = torch.randn(SLOTS, vocab, generator=random) * spread
    logits[3] = logits[3].round()  # many ties
    logits[4, 5:] = float("-inf")
    check_distribution(logits, make_table(random, **columns))


def test_shares_heed_penalties_bias_bans_and_grammar() -> None:
    random, vocab = torch.Generator().manual_seed(5), 4200
    table, extras = make_extras(random, vocab)
    check_distribution(torch.randn(SLOTS, vocab, generator=random) * 3, table, extras)


def test_shares_of_broken_rows_harm_no_other() -> None:
    random = torch.Generator().manual_seed(2)
    logits = torch.randn(SLOTS, 5000, generator=random)
    columns = {"temperature": torch.ones(SLOTS), "top_p": torch.full((SLOTS,), 0.8)}
    arguments = (
        torch.arange(SLOTS, dtype=torch.int32),
        torch.arange(SLOTS),
        make_table(random, **columns),
    )
    expected = distribution(logits.clone(), *arguments)
    logits[0, 4990], logits[1, 0], logits[2] = float("nan"), float("inf"), float("-inf")
    assert torch.equal(distribution(logits, *arguments)[3:], expected[3:])


def shares_of(random: torch.Generator, rows: int, vocab: int) -> torch.Tensor:
    """Random shares, some of them 0."""
    logits = torch.randn(rows, vocab, generator=random) * 3
    logits[torch.rand(rows, vocab, generator=random) < 0.3] = float("-inf")
    return logits.softmax(-1)


@pytest.mark.parametrize("vocab", [8, 4100])
@pytest.mark.parametrize("is_drawn", [True, False], ids=["drawn", "without chance"])
def test_drafts_are_judged_as_by_the_twin(vocab: int, is_drawn: bool) -> None:
    random, rows = torch.Generator().manual_seed(vocab), 40
    wanted, other = shares_of(random, rows, vocab), shares_of(random, rows, vocab)
    other[0] = wanted[0]  # nothing remains
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=random)
    positions = torch.randint(0, 10_000, (rows,), generator=random)
    draft_ids = reference.sample_from_probs(other, seeds, positions, reference.DRAFT_STREAM)
    assert torch.equal(
        sample_from_probs(other, seeds, positions, reference.DRAFT_STREAM), draft_ids
    )
    draft_ids[::2] = wanted[::2].argmax(-1)
    proposed = other if is_drawn else None
    expected = reference.verify_drafts(wanted, proposed, draft_ids, seeds, positions)
    judged = verify_drafts(wanted, proposed, draft_ids, seeds, positions)
    assert torch.equal(judged[1], expected[1])
    assert torch.equal(judged[0], expected[0])
    assert 0 < int(judged[1].sum()) < rows

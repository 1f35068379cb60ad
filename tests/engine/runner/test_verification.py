"""Drafts do not change the output distribution: chi-square tests of both acceptance methods.

A text has three tokens out of eight, each drawn from a distribution that depends on the preceding
ones; the draft's distributions are different. Every text has its own seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch

from engine.runner.drafts import DraftTokens, StepDrafts
from engine.runner.inputs import HostBatch
from engine.runner.rows import RowTable
from engine.runner.transfer import Uploads
from engine.runner.verification import Verifier
from engine.types import AddedRow, Request, SamplingParams
from kernels.reference import operations
from kernels.reference.drafts import (
    DRAFT_STREAM,
    NO_DRAFT,
    RESIDUAL_STREAM,
    accept_drafts,
    verify_drafts,
)
from kernels.reference.sampling import sample_gumbel
from kernels.reference.sampling_step import distribution, position_keys, sample

VOCAB, LENGTH, ROWS = 8, 3, 4000
CPU = torch.device("cpu")
NUM_PROMPT = 1


class Model(NamedTuple):
    """The logits after each text of up to three tokens, indexed by the text as an octal number."""

    logits: torch.Tensor  # [lengths, VOCAB ** LENGTH, VOCAB]

    @classmethod
    def random(cls, seed: int, like: Model | None = None) -> Model:
        noise = torch.randn(
            LENGTH, VOCAB**LENGTH, VOCAB, generator=torch.Generator().manual_seed(seed)
        )
        return cls(noise * 1.2 if like is None else like.logits + noise)


TARGET = Model.random(1)
DRAFT = Model.random(2, like=TARGET)
WARM = SamplingParams(temperature=0.8, top_k=6, top_p=0.95)


class Texts:
    """Rows with the same sampling parameters, each with its own seed."""

    def __init__(self, sampling: SamplingParams, *, rejects: bool) -> None:
        self.rows = RowTable(ROWS, 1, VOCAB, (), CPU)
        for slot in range(ROWS):
            request = Request(id=str(slot), prompt_token_ids=(0,) * NUM_PROMPT, sampling=sampling)
            self.rows.add(AddedRow(request, ()))
        self.rows.sampling.flush()
        self.rejects = rejects
        self.verifier = Verifier(operations, self.rows, Uploads(CPU), rejection_sampling=rejects)

    def write(self, first_seed: int, num_drafts: int, guess: bool) -> torch.Tensor:
        """The texts of these seeds, [ROWS, LENGTH]; with ``guess``, drafts that have no chance."""
        table = self.rows.sampling.table
        table.seed.copy_(torch.arange(ROWS + 1) + first_seed)
        texts = torch.zeros(ROWS, LENGTH + num_drafts + 1, dtype=torch.int64)
        done = torch.zeros(ROWS, dtype=torch.int64)
        while True:
            active = torch.nonzero(done < LENGTH).flatten()
            if not active.numel():
                return texts[:, :LENGTH]
            slots = torch.tensor(self.rows.slots([str(i) for i in active.tolist()]))
            self._step(texts, done, active, slots.int(), num_drafts, guess)

    def _step(self, texts, done, active, slots, num_drafts, guess) -> None:
        drafts, proposed = self._draft(texts, done, active, slots, num_drafts, guess)
        count = active.numel()
        for at in range(num_drafts):
            texts[active, done[active] + at] = drafts[:, at]
        logits = torch.stack(
            [_after(TARGET, texts[active], done[active] + at) for at in range(num_drafts + 1)], 1
        )
        size = num_drafts + 1
        of_row = slots.repeat_interleave(size)
        places = torch.arange(size).repeat(count)
        positions = NUM_PROMPT + done[active].repeat_interleave(size) + places
        ahead = torch.cat((drafts, torch.full((count, 1), NO_DRAFT)), 1).flatten()
        batch = HostBatch(
            slots=of_row.numpy(),
            query_start=np.arange(count * size + 1, dtype=np.int32),
            starts=(positions - 1).int().numpy(),
            token_ids=np.zeros(count * size, np.int32),
            sampling_rows=np.arange(count * size, dtype=np.int32),
        )
        step = StepDrafts(
            np.full(count, size, np.int32), ahead.int().numpy(), DraftTokens(None, proposed)
        )
        judged = self.verifier.sample(
            logits.reshape(-1, VOCAB).contiguous(), batch, step, of_row, positions
        )
        tokens = judged.sampled.token_ids.view(count, size)
        for at in range(size):
            kept = judged.num_accepted >= at
            texts[active[kept], done[active][kept] + at] = tokens[kept, at]
        done[active] += judged.num_accepted + 1

    def _draft(self, texts, done, active, slots, num_drafts, guess):
        table = self.rows.sampling.table
        written, ends = texts[active].clone(), done[active].clone()
        drafts, proposed = [], []
        for _ in range(num_drafts):
            logits, positions = _after(DRAFT, written, ends), NUM_PROMPT + ends
            if guess:
                drafts.append(logits.argmax(-1))
            elif self.rejects:
                shares = distribution(logits, slots, positions, table)
                keys = position_keys(table.seed[slots.long()], positions, DRAFT_STREAM)
                drafts.append(sample_gumbel(shares.log(), keys))
                proposed.append(shares)
            else:
                drafts.append(sample(logits, slots, positions, table).token_ids)
            written[torch.arange(ends.numel()), ends] = drafts[-1]
            ends += 1
        together = torch.stack(proposed, 1).reshape(-1, VOCAB) if proposed else None
        return torch.stack(drafts, 1), together


def _after(model: Model, texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The logits after the first tokens of each text; arbitrary after the last."""
    at = lengths.clamp(max=LENGTH - 1)
    number = torch.zeros_like(at)
    for place in range(LENGTH):
        number = torch.where(place < at, number * VOCAB + texts[:, place], number)
    return model.logits[at, number].clone()


def exact(sampling: SamplingParams) -> torch.Tensor:
    """The exact distribution of whole texts: [VOCAB ** LENGTH] float64."""
    rows = RowTable(1, 1, VOCAB, (), CPU)
    rows.add(AddedRow(Request(id="", prompt_token_ids=(0,), sampling=sampling), ()))
    table = rows.sampling.table
    shares = torch.ones(1, dtype=torch.float64)
    for length in range(LENGTH):
        logits = TARGET.logits[length, : VOCAB**length].clone()
        slots, positions = torch.zeros(len(logits), dtype=torch.int32), torch.ones(len(logits))
        step = distribution(logits, slots, positions.long(), table).double()
        shares = (shares.unsqueeze(1) * step / step.sum(-1, keepdim=True)).flatten()
    return shares


def chi_square(num_texts: int, *, rejects: bool, guess: bool) -> tuple[float, float]:
    """The statistic over whole texts, and the 99.99 % quantile of its distribution."""
    texts = Texts(WARM, rejects=rejects)
    counts = torch.zeros(VOCAB**LENGTH)
    for first in range(0, num_texts, ROWS):
        written = texts.write(7919 * first, num_drafts=2, guess=guess)
        number = (written * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(-1)
        counts += torch.bincount(number, minlength=VOCAB**LENGTH)
    shares = exact(WARM)
    if counts[shares == 0].sum():  # tokens excluded by truncation
        return math.inf, 0.0
    rare = shares * num_texts < 5.0  # pooled
    expected = torch.cat((shares[~rare], shares[rare].sum().view(1))) * num_texts
    seen = torch.cat((counts[~rare], counts[rare].sum().view(1))).double()
    expected, seen = expected[expected > 0], seen[expected > 0]
    freedom = len(expected) - 1
    statistic = ((seen - expected) ** 2 / expected).sum().item()
    # Wilson and Hilferty 1931
    spread = 2 / (9 * freedom)
    return statistic, freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize("rejects", [False, True], ids=["coupled", "rejection"])
def test_the_distribution_of_texts_is_as_without_drafts(rejects):
    statistic, most = chi_square(48_000, rejects=rejects, guess=False)
    assert statistic < most


@pytest.mark.slow
@pytest.mark.parametrize("guess", [False, True], ids=["drawn", "without chance"])
@pytest.mark.parametrize("rejects", [False, True], ids=["coupled", "rejection"])
def test_the_distribution_is_the_same_over_many_texts(rejects, guess):
    statistic, most = chi_square(208_000, rejects=rejects, guess=guess)
    assert statistic < most


def _keep_always(wanted, proposed, draft_ids, seeds, positions):
    return draft_ids, torch.ones_like(draft_ids, dtype=torch.bool)


def _draw_again_from_all(wanted, proposed, draft_ids, seeds, positions):
    """Planted bug: a rejected draft is replaced from q, not from the residual of p."""
    _, kept = verify_drafts(wanted, proposed, draft_ids, seeds, positions)
    keys = position_keys(seeds, positions, RESIDUAL_STREAM)
    return torch.where(kept, draft_ids, sample_gumbel(wanted.log(), keys)), kept


def _forget_the_ratio(wanted, proposed, draft_ids, seeds, positions):
    """Planted bug: a draft is accepted with probability q, whatever p is."""
    _, kept = verify_drafts(wanted, None, draft_ids, seeds, positions)
    rest = (wanted - proposed).clamp(min=1e-9).log()
    again = sample_gumbel(rest, position_keys(seeds, positions, RESIDUAL_STREAM))
    return torch.where(kept, draft_ids, again), kept


def _one_chance_for_both(wanted, proposed, draft_ids, seeds, positions):
    """Planted bug: the residual is drawn with the same noise as the draft."""
    tokens, kept = verify_drafts(wanted, proposed, draft_ids, seeds, positions)
    rest = (wanted - proposed).clamp(min=1e-9).log()
    again = sample_gumbel(rest, position_keys(seeds, positions, DRAFT_STREAM))
    return torch.where(kept, tokens, again), kept


MUTANTS = (_keep_always, _draw_again_from_all, _forget_the_ratio, _one_chance_for_both)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_rule_is_noticed(monkeypatch, mutant: Callable):
    monkeypatch.setattr(operations, "verify_drafts", mutant)
    statistic, most = chi_square(32_000, rejects=True, guess=False)
    assert statistic > most


def test_coupled_texts_are_those_without_drafts():
    """Token by token, whatever the drafts; and a good drafter is nearly always right."""
    texts = Texts(WARM, rejects=False)
    one = texts.write(5, num_drafts=1, guess=False)
    assert torch.equal(one, texts.write(5, num_drafts=3, guess=False))
    assert torch.equal(one, texts.write(5, num_drafts=2, guess=True))


def test_drafts_are_kept_up_to_the_first_that_is_wrong():
    is_kept = torch.tensor([True, False, True, False, False, True, True, False])
    slots = torch.tensor([2, 2, 2, 2, 0, 3, 3, 3], dtype=torch.int32)
    sizes = torch.tensor([4, 1, 3], dtype=torch.int32)
    newest, token_ids = torch.full((4,), -1), torch.arange(10, 18)
    accepted = accept_drafts(newest, slots, token_ids, is_kept, sizes)
    assert accepted.tolist() == [1, 0, 2]
    assert newest.tolist() == [14, -1, 11, 17]


def test_a_likelier_draft_is_always_kept_and_an_impossible_one_never():
    wanted = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).repeat(2000, 1)
    proposed = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).repeat(2000, 1)
    seeds, positions = torch.arange(2000), torch.full((2000,), 9)
    for draft, share in ((0, 1.0), (1, 1.0), (2, 0.0)):
        drafts = torch.full((2000,), draft)
        tokens, kept = verify_drafts(wanted, proposed, drafts, seeds, positions)
        assert kept.float().mean() == share
        assert (tokens < 2).all()

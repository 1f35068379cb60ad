"""The sampler: each parameter against its definition, and no row touched by its neighbours."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.columns import SamplingColumns
from engine.sampling.logprobs import token_logprobs
from engine.sampling.penalties import TokenCounts
from engine.sampling.sampler import Sampler
from engine.sampling.seeds import position_keys
from engine.types import Request, SamplingParams

VOCAB = 192
EOS = 5


class Batch:
    """Rows as the runner keeps them: each at a slot, with a prompt and an output so far."""

    def __init__(self, vocab: int = VOCAB) -> None:
        self.columns = SamplingColumns(8, (EOS,))
        self.counts = TokenCounts(vocab, torch.device("cpu"))
        self.sampler = Sampler(self.columns, self.counts)
        self.lengths: dict[int, int] = {}

    def put(self, slot, prompt=(1, 2, 3), output=(), **sampling) -> Batch:
        params = SamplingParams(**{"seed": slot, **sampling})
        request = Request(id=str(slot), prompt_token_ids=tuple(prompt), sampling=params)
        self.columns.set(slot, request)
        if self.columns.is_penalised[slot]:
            self.counts.set(slot, prompt, output)
        self.lengths[slot] = len(prompt) + len(output)
        return self

    def sample(self, logits: torch.Tensor, slots, offset: int = 0):
        positions = np.array([self.lengths[slot] + offset for slot in slots])
        return self.sampler.sample(logits.clone(), np.array(slots), positions)


def noise(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).mul_(3)


def test_greedy_is_the_arg_max():
    logits = noise(4)
    batch = Batch()
    for slot in range(4):
        batch.put(slot, temperature=0.0)
    assert batch.sample(logits, [0, 1, 2, 3]).token_ids == logits.argmax(-1).tolist()


def test_frequencies_follow_temperature():
    """Chi-square over 20 tokens and 20,000 positions; 99.9 % quantile of 19 degrees is 43.8."""
    logits = noise(1, vocab=20) / 2
    batch = Batch(20).put(0, temperature=0.7)
    sampled = torch.zeros(20)
    for chunk in range(10):
        positions = np.arange(2000) + 2000 * chunk
        rows = batch.sampler.sample(logits.repeat(2000, 1), np.zeros(2000, np.int64), positions)
        sampled += torch.bincount(torch.tensor(rows.token_ids), minlength=20)
    expected = torch.softmax(logits[0].double() / 0.7, -1) * 20_000
    assert (((sampled - expected) ** 2) / expected).sum().item() < 43.8


def test_truncated_frequencies_follow_the_renormalised_rest():
    """top_k 8 leaves 8 tokens: 7 degrees of freedom, 99.9 % quantile 24.3."""
    logits = noise(1) / 3
    batch = Batch().put(0, top_k=8)
    positions = np.arange(10_000)
    rows = batch.sampler.sample(logits.repeat(10_000, 1), np.zeros(10_000, np.int64), positions)
    sampled = torch.bincount(torch.tensor(rows.token_ids), minlength=VOCAB)
    kept = logits[0].topk(8).indices
    assert int(sampled[kept].sum()) == 10_000
    expected = torch.softmax(logits[0, kept].double(), -1) * 10_000
    assert (((sampled[kept] - expected) ** 2) / expected).sum().item() < 24.3


PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([1, 5, 150]),
        "top_p": st.sampled_from([0.1, 0.8]),
        "min_p": st.sampled_from([0.05, 0.3]),
        "presence_penalty": st.sampled_from([-1.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.5]),
        "repetition_penalty": st.sampled_from([0.7, 1.4]),
        "logit_bias": st.just({7: 6.0, 9: -100.0}),
        "min_tokens": st.just(4),
        "logprobs": st.sampled_from([0, 3]),
    },
)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(PARAMETERS, min_size=2, max_size=8), order=st.randoms(), seed=st.integers(0, 99)
)
def test_a_row_is_not_changed_by_its_neighbours(rows, order, seed):
    logits = noise(len(rows), seed)
    batch = Batch()
    for slot, sampling in enumerate(rows):
        batch.put(slot, output=(7, 7, 11), **sampling)
    slots = list(range(len(rows)))
    order.shuffle(slots)
    together = batch.sample(logits[slots], slots)
    for place, slot in enumerate(slots):
        alone = batch.sample(logits[slot : slot + 1], [slot])
        assert together.token_ids[place] == alone.token_ids[0]
        told, alone_told = together.logprobs[place], alone.logprobs[0]
        assert (told is None) == (alone_told is None) == ("logprobs" not in rows[slot])
        if told is not None and alone_told is not None:
            assert told.top_ids == alone_told.top_ids
            assert told.logprob == pytest.approx(alone_told.logprob, abs=1e-5)


def test_seed_and_position_decide():
    logits = noise(1) / 10
    batch = Batch().put(0, seed=1).put(1, seed=1).put(2, seed=2)
    draws = [[batch.sample(logits, [s], p).token_ids[0] for p in range(30)] for s in range(3)]
    assert draws[0] == draws[1]
    assert sum(a == b for a, b in zip(draws[0], draws[2], strict=True)) < 5
    assert len(set(draws[0])) > 15


def test_keys_differ_for_all_seeds_and_positions():
    seeds, positions = np.meshgrid(np.arange(-50, 50), np.arange(200))
    keys = position_keys(seeds.ravel(), positions.ravel())
    assert np.unique(keys, axis=0).shape[0] == 20_000
    extreme = np.array([-(2**63), 2**63 - 1])
    assert position_keys(extreme, np.array([0, 2**31])).dtype == np.int32


def test_penalties_are_those_of_the_definitions():
    logits = noise(1)
    prompt, output = (10, 11, 11), (11, 12, 12, 12)
    batch = Batch().put(
        0,
        prompt,
        output,
        temperature=0.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
    )
    expected = logits[0].clone()
    for token in (10, 11, 12):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    expected[11] -= 0.5 + 0.25 * 1
    expected[12] -= 0.5 + 0.25 * 3
    columns = batch.columns
    actual = batch.counts.penalise(
        logits,
        np.array([0]),
        *(
            torch.from_numpy(column[[0]])[:, None]
            for column in (
                columns.presence_penalty,
                columns.frequency_penalty,
                columns.repetition_penalty,
            )
        ),
    )
    torch.testing.assert_close(actual[0], expected)


def test_counts_of_many_rows_come_and_go():
    counts = TokenCounts(20, torch.device("cpu"))
    one = torch.ones(1, 1)
    for slot in range(11):
        counts.set(slot, [slot], [])
    counts.add([3, 3, 4], [7, 7, 8])
    counts.clear(3)
    counts.set(12, [1], [2])  # on a line that was used
    for slot, expected in ((4, {8: 1.0}), (12, {2: 1.0}), (10, {})):
        frequency = counts.penalise(torch.zeros(1, 20), np.array([slot]), 0 * one, one, one)
        assert {i: -v for i, v in enumerate(frequency[0].tolist()) if v} == expected


def test_bias_moves_a_token_and_bans_one():
    logits = torch.zeros(1, VOCAB)
    logits[0, 50] = 10.0
    batch = Batch().put(0, temperature=0.0, logit_bias={50: -100.0, 60: 5.0})
    assert batch.sample(logits, [0]).token_ids == [60]


def test_no_end_before_min_tokens():
    logits = torch.zeros(2, VOCAB)
    logits[:, EOS], logits[:, 9], logits[:, 20] = 30.0, 20.0, 10.0
    batch = Batch()
    batch.put(0, temperature=0.0, min_tokens=3, stop_token_ids=(9,), logit_bias={EOS: 100.0})
    batch.put(1, temperature=0.0, min_tokens=3, ignore_eos=True)
    taken = [batch.sample(logits, [0, 1], offset).token_ids for offset in range(4)]
    assert [pair[0] for pair in taken] == [20, 20, 20, EOS]
    assert [pair[1] for pair in taken] == [EOS] * 4  # nothing to ban: it does not end there


def test_broken_rows_are_told_and_the_others_are_whole():
    logits = noise(5)
    logits[1, 3] = math.nan
    logits[2, 4] = math.inf
    logits[3] = -math.inf
    logits[4, 5] = -math.inf  # one impossible token is no fault
    batch = Batch()
    for slot in range(5):
        batch.put(slot, top_p=0.9, top_k=50, logprobs=2)
    sampled = batch.sample(logits, [0, 1, 2, 3, 4])
    assert sampled.is_finite == [True, False, False, False, True]
    for place in (0, 4):
        alone = batch.sample(logits[place : place + 1], [place])
        assert sampled.token_ids[place] == alone.token_ids[0]


def test_logprobs_are_of_the_raw_distribution():
    logits = noise(2)
    batch = Batch()
    batch.put(0, temperature=0.0, logprobs=3, logit_bias={9: 100.0}, repetition_penalty=2.0)
    batch.put(1, temperature=0.5, logprobs=0)
    sampled = batch.sample(logits, [0, 1])
    raw = torch.log_softmax(logits, -1)
    first, second = sampled.logprobs
    assert first is not None
    assert second is not None
    assert first.token_id == 9
    assert first.logprob == raw[0, 9].item()
    assert first.rank == 1 + int((raw[0] > raw[0, 9]).sum())
    assert first.top_ids == tuple(raw[0].topk(3).indices.tolist())
    assert first.top_logprobs == tuple(raw[0].topk(3).values.tolist())
    assert second.token_id == sampled.token_ids[1]
    assert (second.top_ids, second.top_logprobs) == ((), ())


def test_a_tied_arg_max_comes_first():
    logits = torch.zeros(3, 64)
    for token in range(64):
        for entry in token_logprobs(logits, torch.full((3,), token), [0, 1, 5]):
            assert entry.rank == 1
            assert entry.top_ids[:1] in ((), (token,))
            assert len(set(entry.top_ids)) == len(entry.top_ids) == len(entry.top_logprobs)
            assert all(value == entry.logprob for value in entry.top_logprobs)


def test_tiny_temperature_is_greedy():
    logits = noise(1)
    batch = Batch().put(0, temperature=1e-30, top_p=0.9)
    assert batch.sample(logits, [0]).token_ids == logits.argmax(-1).tolist()

"""The sampler: each parameter against its definition, and rows that do not affect each other."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.counts import CountLines
from engine.sampling.logprobs import entries, logprob_columns
from engine.sampling.state import SamplingState
from engine.types import AddedRow, Request, SamplingParams
from kernels.reference.sampling_step import position_keys, sample
from kernels.sampling import SamplerOutput

VOCAB = 192
EOS = 5


class Batch:
    """Rows as the runner keeps them: each in a slot, with a prompt and an output so far."""

    def __init__(self, vocab: int = VOCAB) -> None:
        self.state = SamplingState(8, vocab, (EOS,), torch.device("cpu"))
        self.lengths: dict[int, int] = {}

    def put(self, slot, prompt=(1, 2, 3), output=(), **sampling) -> Batch:
        params = SamplingParams(**{"seed": slot, **sampling})
        request = Request(id=str(slot), prompt_token_ids=tuple(prompt), sampling=params)
        self.state.set(slot, AddedRow(request, tuple(output)))
        self.lengths[slot] = len(prompt) + len(output)
        return self

    def sample(self, logits: torch.Tensor, slots, offset: int = 0) -> SamplerOutput:
        positions = [self.lengths[slot] + offset for slot in slots]
        return self.sample_at(logits, slots, torch.tensor(positions))

    def sample_at(self, logits: torch.Tensor, slots, positions: torch.Tensor) -> SamplerOutput:
        state, at = self.state, np.array(slots)
        state.flush()
        on_device = torch.tensor(slots, dtype=torch.int32)
        table, counts, bias = state.table, state.counts(at), state.bias(at)
        return sample(logits.clone(), on_device, positions, table, counts, bias)

    def tokens(self, logits: torch.Tensor, slots, offset: int = 0) -> list[int]:
        return self.sample(logits, slots, offset).token_ids.tolist()


def noise(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).mul_(3)


def test_greedy_is_the_arg_max():
    logits = noise(4)
    batch = Batch()
    for slot in range(4):
        batch.put(slot, temperature=0.0)
    assert batch.tokens(logits, [0, 1, 2, 3]) == logits.argmax(-1).tolist()


def test_frequencies_follow_temperature():
    """Chi-square over 20 tokens and 20,000 positions; 99.9 % quantile of 19 degrees is 43.8."""
    logits = noise(1, vocab=20) / 2
    batch = Batch(20).put(0, temperature=0.7)
    sampled = torch.zeros(20)
    for chunk in range(10):
        positions = torch.arange(2000) + 2000 * chunk
        rows = batch.sample_at(logits.repeat(2000, 1), [0] * 2000, positions)
        sampled += torch.bincount(rows.token_ids, minlength=20)
    expected = torch.softmax(logits[0].double() / 0.7, -1) * 20_000
    assert (((sampled - expected) ** 2) / expected).sum().item() < 43.8


def test_truncated_frequencies_follow_the_renormalised_rest():
    """top_k 8 leaves 8 tokens: 7 degrees of freedom, 99.9 % quantile 24.3."""
    logits = noise(1) / 3
    batch = Batch().put(0, top_k=8)
    rows = batch.sample_at(logits.repeat(10_000, 1), [0] * 10_000, torch.arange(10_000))
    sampled = torch.bincount(rows.token_ids, minlength=VOCAB)
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
    together = batch.tokens(logits[slots], slots)
    alone = [batch.tokens(logits[slot : slot + 1], [slot])[0] for slot in slots]
    assert together == alone


def test_seed_and_position_decide():
    logits = noise(1) / 10
    batch = Batch().put(0, seed=1).put(1, seed=1).put(2, seed=2)
    draws = [[batch.tokens(logits, [s], p)[0] for p in range(30)] for s in range(3)]
    assert draws[0] == draws[1]
    assert sum(a == b for a, b in zip(draws[0], draws[2], strict=True)) < 5
    assert len(set(draws[0])) > 15


def test_keys_differ_for_all_seeds_and_positions():
    seeds, positions = torch.meshgrid(torch.arange(-50, 50), torch.arange(200), indexing="ij")
    keys = position_keys(seeds.flatten(), positions.flatten())
    assert keys.unique(dim=0).shape[0] == 20_000
    extreme = torch.tensor([-(2**63), 2**63 - 1])
    assert position_keys(extreme, torch.tensor([0, 2**31])).dtype == torch.int32


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
    # The arg-max after penalties, with one token after another removed.
    for _ in range(VOCAB - 1):
        best = int(expected.argmax())
        assert batch.tokens(logits, [0]) == [best]
        expected[best] = logits[0, best] = -math.inf


def test_counts_of_many_rows_come_and_go():
    lines = CountLines(20, torch.device("cpu"))
    taken = [lines.allocate(slot, [slot], [slot + 1]) for slot in range(11)]
    assert len(set(taken)) == 11
    lines.free(3)
    assert lines.allocate(12, [1], [2, 2]) == taken[3]  # on a line that was used before
    counts = lines.counts
    assert counts.output[taken[3]].nonzero().flatten().tolist() == [2]
    assert counts.output[taken[3], 2] == 2
    assert counts.output[taken[10], 11] == 1
    assert counts.prompt[taken[3]].nonzero().flatten().tolist() == [1]
    assert len(lines) == 11


def test_bias_moves_a_token_and_bans_one():
    logits = torch.zeros(1, VOCAB)
    logits[0, 50] = 10.0
    batch = Batch().put(0, temperature=0.0, logit_bias={50: -100.0, 60: 5.0})
    assert batch.tokens(logits, [0]) == [60]


def test_ends_that_the_model_cannot_say_need_no_ban():
    """A config may name such tokens, and a GPU kernel writes to any index it is given."""
    state = SamplingState(1, VOCAB, (-1, EOS, VOCAB), torch.device("cpu"))
    params = SamplingParams(min_tokens=3, stop_token_ids=(9,))
    state.set(0, AddedRow(Request(id="0", prompt_token_ids=(1,), sampling=params), ()))
    state.flush()
    bias = state.bias(np.array([0]))
    assert bias is not None
    assert bias.token_ids.tolist() == [EOS, 9]


def test_no_end_before_min_tokens():
    logits = torch.zeros(2, VOCAB)
    logits[:, EOS], logits[:, 9], logits[:, 20] = 30.0, 20.0, 10.0
    batch = Batch()
    batch.put(0, temperature=0.0, min_tokens=3, stop_token_ids=(9,), logit_bias={EOS: 100.0})
    batch.put(1, temperature=0.0, min_tokens=3, ignore_eos=True)
    taken = [batch.tokens(logits, [0, 1], offset) for offset in range(4)]
    assert [pair[0] for pair in taken] == [20, 20, 20, EOS]
    assert [pair[1] for pair in taken] == [EOS] * 4  # nothing to ban: these do not end the text


def test_broken_rows_are_told_and_the_others_are_whole():
    logits = noise(5)
    logits[1, 3] = math.nan
    logits[2, 4] = math.inf
    logits[3] = -math.inf
    logits[4, 5] = -math.inf  # one impossible token is not an error
    batch = Batch()
    for slot in range(5):
        batch.put(slot, top_p=0.9, top_k=50)
    sampled = batch.sample(logits, [0, 1, 2, 3, 4])
    assert sampled.is_finite.tolist() == [True, False, False, False, True]
    for place in (0, 4):
        assert batch.tokens(logits[place : place + 1], [place]) == [int(sampled.token_ids[place])]


def test_logprobs_tell_value_rank_and_the_likeliest():
    logits = noise(2)
    raw = torch.log_softmax(logits, -1)
    first, second = entries(logprob_columns(logits, torch.tensor([9, 30]), 3), [3, 0])
    assert first.token_id == 9
    assert first.logprob == raw[0, 9].item()
    assert first.rank == 1 + int((raw[0] > raw[0, 9]).sum())
    assert first.top_ids == tuple(raw[0].topk(3).indices.tolist())
    assert first.top_logprobs == tuple(raw[0].topk(3).values.tolist())
    assert (second.token_id, second.top_ids, second.top_logprobs) == (30, (), ())


def test_bias_that_comes_and_goes_is_laid_out_anew():
    logits = torch.zeros(2, VOCAB)
    batch = Batch()
    batch.put(0, temperature=0.0, logit_bias={50: 2.0, 51: 1.0})
    batch.put(1, temperature=0.0, logit_bias={60: 5.0})
    assert batch.tokens(logits, [0, 1]) == [50, 60]
    batch.state.clear(0)
    batch.put(2, temperature=0.0, logit_bias={70: 1.0})
    assert batch.tokens(logits, [2, 1]) == [70, 60]
    batch.put(0, temperature=0.0)
    assert batch.tokens(logits, [0, 1]) == [0, 60]


def test_a_tied_arg_max_comes_first():
    logits = torch.zeros(3, 64)
    for token in range(64):
        columns = logprob_columns(logits, torch.full((3,), token), 5)
        for entry in entries(columns, [0, 1, 5]):
            assert entry.rank == 1
            assert entry.top_ids[:1] in ((), (token,))
            assert len(set(entry.top_ids)) == len(entry.top_ids) == len(entry.top_logprobs)
            assert all(value == entry.logprob for value in entry.top_logprobs)


def test_tiny_temperature_is_greedy():
    logits = noise(1)
    batch = Batch().put(0, temperature=1e-30, top_p=0.9)
    assert batch.tokens(logits, [0]) == logits.argmax(-1).tolist()

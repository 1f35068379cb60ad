"""Rows for comparing the sampling kernels with the reference, which sorts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.reference.sampling_step import sample as reference_sample
from kernels.sampling import LogitBias, SamplerOutput, SamplingTable, TokenCounts

SLOTS = 6
Extras = tuple[TokenCounts, LogitBias, torch.Tensor]


def make_table(random: torch.Generator, **columns: torch.Tensor) -> SamplingTable:
    """Plain greedy rows, except for the given columns."""
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


def make_extras(random: torch.Generator, vocab: int) -> tuple[SamplingTable, Extras]:
    """Rows with penalties, biases, bans and masks, and the tables these refer to."""
    lines, size = 3, 200  # more entries than fit one tile
    counts = TokenCounts(
        torch.randint(0, 3, (lines, vocab), generator=random, dtype=torch.int32),
        torch.rand(lines, vocab, generator=random) < 0.3,
    )
    bias = LogitBias(
        token_ids=torch.randperm(vocab, generator=random)[:size].to(torch.int32),
        values=torch.randn(size, generator=random) * 10,
        until=torch.full((size,), 2**62),
    )
    bias.token_ids[5], bias.values[5] = bias.token_ids[4], float("-inf")  # both biased and banned
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
    return table, (counts, bias, masks.to(torch.int32))


def check(
    sample: Callable[..., SamplerOutput],
    random: torch.Generator,
    logits: torch.Tensor,
    table: SamplingTable,
    extras: tuple[()] | Extras = (),
) -> torch.Tensor:
    """Compare ``sample`` with the reference on the same rows, in a random order of slots.

    Also with bfloat16 logits, which must not be modified, and with a given output buffer.
    """
    slots = torch.randperm(SLOTS, generator=random).to(torch.int32)
    positions = torch.randint(0, 10_000, (SLOTS,), generator=random)
    given = slots, positions, table, *(extras or (None, None, None))
    rounded = logits.bfloat16()
    results = [
        (sample(logits.clone(), *given), reference_sample(logits.clone(), *given)),
        (sample(rounded, *given), reference_sample(rounded.float(), *given)),
    ]
    assert torch.equal(rounded.view(torch.int16), logits.bfloat16().view(torch.int16))
    room = SamplerOutput.empty(SLOTS, logits.device)
    assert sample(logits.clone(), *given, room) is room
    results.append((room, results[0][0]))
    for sampled, expected in results:
        good = expected.is_finite
        assert torch.equal(sampled.is_finite, good)
        assert torch.equal(sampled.token_ids[good], expected.token_ids[good])
    return room.token_ids


def check_overflows(sample: Callable[..., SamplerOutput]) -> None:
    """Compare rows with logits that penalties or temperature divide beyond the largest float."""
    random, vocab = torch.Generator().manual_seed(1), 300
    logits = torch.randn(SLOTS, vocab, generator=random) * 4
    logits[:, 70:73] = torch.tensor([20.0, 25.0, 22.0])
    logits[2, 100] = 3e38  # over a temperature of a half
    table = make_table(
        random,
        temperature=torch.tensor([0.01, 0.01, 0.5, 0.0, 0.01, 0.01]),
        min_p=torch.full((SLOTS,), 0.05),
        repetition=torch.tensor([1e-37, 1e-37, 1.0, 1e-37, 5e-38, 0.01]),
        count_line=torch.tensor([0, 1, -1, 0, 0, 0], dtype=torch.int32),
    )
    is_seen = torch.zeros(2, vocab, dtype=torch.bool)
    is_seen[0] = True
    is_seen[1, 71] = True  # of a row's tokens, one
    counts = TokenCounts(torch.zeros(2, vocab, dtype=torch.int32), is_seen)
    slots, positions = torch.arange(SLOTS, dtype=torch.int32), torch.arange(SLOTS)
    for top_p in (0.9, 1.0):
        for top_k in (0, 2):
            cuts = {
                "top_p": torch.full((SLOTS,), top_p),
                "top_k": torch.full((SLOTS,), top_k, dtype=torch.int32),
            }
            given = slots, positions, table._replace(**cuts), counts
            expected = reference_sample(logits.clone(), *given)
            assert expected.is_finite.tolist() == [False, False, False, True, False, True]
            sampled = sample(logits.clone(), *given)
            assert torch.equal(sampled.is_finite, expected.is_finite)
            good = expected.is_finite
            assert torch.equal(sampled.token_ids[good], expected.token_ids[good])

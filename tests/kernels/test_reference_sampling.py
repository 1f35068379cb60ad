"""The sampling primitives, compared with sorting and with their exact distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.reference.sampling import (
    argmax,
    exponential_noise,
    sample_gumbel,
    truncation_threshold,
)
from kernels.reference.sampling_step import position_keys


def keys_of(seed: int, count: int, start: int = 0) -> torch.Tensor:
    return position_keys(torch.full((count,), seed), torch.arange(start, start + count))


@pytest.mark.parametrize("vocab", [64, 3072, 100, 1])
def test_argmax_is_the_first_of_the_largest(vocab):
    scores = torch.randint(0, 5, (9, vocab)).float()
    expected = [int(np.argmax(row)) for row in scores.numpy()]
    assert argmax(scores).tolist() == expected
    scores[3, vocab // 2] = math.nan
    assert argmax(scores)[3] == vocab // 2


def test_noise_is_exponential_and_reaches_far_into_both_tails():
    noise = exponential_noise(keys_of(3, 200), 5000).double().flatten()
    assert bool((noise > 0).all())
    assert bool(torch.isfinite(noise).all())
    # Mean 1, variance 1; standard errors 0.001 and 0.0028 for a million draws.
    assert abs(noise.mean().item() - 1) < 0.005
    assert abs(noise.var().item() - 1) < 0.015
    # P(e < 1e-4) is 1e-4: 100 of a million are expected, and P(e > 10) is 45 of a million.
    assert 60 < int((noise < 1e-4).sum()) < 145
    assert 20 < int((noise > 10).sum()) < 75


def test_noise_of_neighbours_is_unrelated():
    """Positions, tokens and seeds that differ by one are uncorrelated."""
    noise = exponential_noise(keys_of(1, 300), 3000).double()
    other = exponential_noise(keys_of(2, 300), 3000).double()
    pairs = {
        "position": (noise[:-1], noise[1:]),
        "token": (noise[:, :-1], noise[:, 1:]),
        "seed": (noise, other),
        "seed and position": (noise[1:], other[:-1]),
    }
    for word in (0, 1):  # each word of a key matters by itself
        keys = torch.full((300, 2), 77, dtype=torch.int32)
        keys[:, word] = torch.arange(300)
        related = exponential_noise(keys, 3000).double()
        pairs[f"word {word}"] = (related[:-1], related[1:])
    for name, (a, b) in pairs.items():
        correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
        assert abs(correlation.item()) < 5e-3, name


def test_drawn_tokens_follow_the_distribution():
    """Chi-square over 12 tokens and 40,000 positions: 99.9 % quantile of 11 degrees is 31.3."""
    probabilities = torch.tensor(
        [0.3, 0.2, 0.15, 0.1, 0.08, 0.06, 0.04, 0.03, 0.02, 0.01, 0.007, 0.003]
    )
    logits = probabilities.log().expand(40_000, -1)
    drawn = torch.bincount(sample_gumbel(logits, keys_of(11, 40_000)), minlength=12)
    expected = probabilities.double() * 40_000
    chi_square = ((drawn - expected) ** 2 / expected).sum().item()
    assert chi_square < 31.3


def test_what_is_masked_is_never_drawn():
    logits = torch.full((2000, 64), -math.inf)
    logits[:, 17] = -80.0
    assert sample_gumbel(logits, keys_of(5, 2000)).unique().tolist() == [17]


def _naive_kept(
    logits: np.ndarray, top_k: int, top_p: float, min_p: float
) -> tuple[list[int], float]:
    """min_p, then top_k, then top_p over the rest, by sorting, in float64.

    Also returns the share of the mass by which the last entry was kept or the next one dropped.
    """
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits.astype(np.float64) - logits.max())
    kept = [int(i) for i in order if weights[i] >= min_p * (1 - 1e-7)][:top_k]
    if top_p >= 1.0:
        return kept, 1.0
    before = np.concatenate(([0.0], np.cumsum(weights[kept]))) / weights[kept].sum()
    count = max(1, int((before[:-1] < top_p).sum()))
    margin = np.abs(before[max(1, count - 1) : count + 1] - top_p).min()
    return kept[:count], float(margin)


@settings(max_examples=150, deadline=None)
@given(
    vocab=st.sampled_from([7, 128, 129, 500]),
    spread=st.sampled_from([0.01, 1.0, 6.0]),
    top_k=st.sampled_from([1, 3, 127, 128, 200, 2**31]),
    top_p=st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_truncation_keeps_what_sorting_keeps(vocab, spread, top_k, top_p, min_p, seed):
    logits = np.random.default_rng(seed).normal(0, spread, (3, vocab)).astype(np.float32)
    threshold = truncation_threshold(
        torch.from_numpy(logits),
        torch.full((3,), top_k),
        torch.full((3,), top_p),
        torch.full((3,), min_p),
    ).numpy()
    for row, limit in zip(logits, threshold, strict=True):
        expected, margin = _naive_kept(row, top_k, top_p, min_p)
        if margin > 1e-5:  # closer than that, float32 rounding of sums decides
            assert set(np.flatnonzero(row >= limit).tolist()) == set(expected)


def test_each_row_is_truncated_by_its_own_parameters():
    logits = torch.randn(4, 300)
    top_k, top_p = torch.tensor([1, 2**31, 5, 2**31]), torch.tensor([1.0, 0.7, 1.0, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.1])
    together = truncation_threshold(logits, top_k, top_p, min_p)
    for i in range(4):
        row = slice(i, i + 1)
        alone = truncation_threshold(logits[row], top_k[row], top_p[row], min_p[row])
        torch.testing.assert_close(together[row], alone)
    assert (logits >= together).sum(dim=1).tolist()[::2] == [1, 5]

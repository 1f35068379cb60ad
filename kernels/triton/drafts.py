"""Verification of drafts on the device: one launch accepts drafts, one replaces rejected ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.reference.drafts import ACCEPT_STREAM, RESIDUAL_STREAM
from kernels.triton.launch import launch, wait_for_prior_kernels
from kernels.triton.noise import gumbel, position_keys

_GROUP_TILE = 32
_TILE = 2048


def accept_drafts(
    newest: torch.Tensor,
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    is_kept: torch.Tensor,
    sizes: torch.Tensor,
) -> torch.Tensor:
    """See ``kernels.reference.drafts.accept_drafts``."""
    accepted = torch.empty(sizes.shape[0], dtype=torch.int64, device=newest.device)
    launch(
        _accept_kernel,
        (sizes.shape[0],),
        newest,
        accepted,
        slots,
        token_ids,
        is_kept,
        sizes,
        TILE=_GROUP_TILE,
        num_warps=1,
    )
    return accepted


def verify_drafts(
    wanted: torch.Tensor,
    proposed: torch.Tensor | None,
    draft_ids: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.reference.drafts.verify_drafts``."""
    token_ids = torch.empty_like(draft_ids)
    is_kept = torch.empty(draft_ids.shape, dtype=torch.bool, device=wanted.device)
    launch(
        _judge_kernel,
        (wanted.shape[0],),
        token_ids,
        is_kept,
        wanted,
        proposed,
        draft_ids,
        seeds,
        positions,
        wanted.shape[1],
        ACCEPT=ACCEPT_STREAM << 40,
        RESIDUAL=RESIDUAL_STREAM << 40,
        TILE=_TILE,
        num_warps=16,
    )
    return token_ids, is_kept


def sample_from_probs(
    shares: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: int
) -> torch.Tensor:
    """See ``kernels.reference.drafts.sample_from_probs``."""
    token_ids = torch.empty(shares.shape[0], dtype=torch.int64, device=shares.device)
    launch(
        _draw_kernel,
        (shares.shape[0],),
        token_ids,
        shares,
        seeds,
        positions,
        shares.shape[1],
        STREAM=stream << 40,
        TILE=_TILE,
        num_warps=16,
    )
    return token_ids


# Sizes are a slice of a transfer, with any alignment.
@triton.jit(do_not_specialize_on_alignment=["sizes"])
def _accept_kernel(newest, accepted, slots, token_ids, is_kept, sizes, TILE: tl.constexpr):
    """One group of verified tokens."""
    wait_for_prior_kernels()
    group = tl.program_id(0)
    begins = tl.zeros([TILE], tl.int32)
    for first in range(0, group, TILE):
        at = first + tl.arange(0, TILE)
        begins += tl.load(sizes + at, mask=at < group, other=0)
    begin = tl.sum(begins, axis=0)
    last = tl.load(sizes + group) - 1  # no draft follows it
    refused = tl.full([TILE], 2**31 - 1, tl.int32)
    for first in range(0, last, TILE):
        at = first + tl.arange(0, TILE)
        kept = tl.load(is_kept + begin + at, mask=at < last, other=1)
        refused = tl.minimum(refused, tl.where(kept != 0, 2**31 - 1, at))
    num_kept = tl.minimum(tl.min(refused, axis=0), last)
    tl.store(accepted + group, num_kept.to(tl.int64))
    slot = tl.load(slots + begin)
    tl.store(newest + slot, tl.load(token_ids + begin + num_kept))


@triton.jit
def _judge_kernel(
    token_ids,
    is_kept,
    wanted,
    proposed,
    draft_ids,
    seeds,
    positions,
    vocab,
    ACCEPT: tl.constexpr,
    RESIDUAL: tl.constexpr,
    TILE: tl.constexpr,
):
    """One draft: accepted, or replaced by a sample from the residual distribution."""
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    draft, seed = tl.load(draft_ids + row), tl.load(seeds + row)
    position = tl.load(positions + row)
    wanted += row * vocab
    q, p = tl.load(wanted + draft), tl.full([], 1.0, tl.float32)
    if proposed is not None:
        proposed += row * vocab
        p = tl.load(proposed + draft)
    at = position + ACCEPT
    chance, _ = position_keys(seed, at)  # pyright: ignore[reportGeneralTypeIssues]
    uniform = ((chance & 0x7FFFFFFF).to(tl.float64) + 0.5) * 4.656612873077393e-10  # 2^-31
    kept = uniform * p.to(tl.float64) < q.to(tl.float64)

    at = position + RESIDUAL
    key_0, key_1 = position_keys(seed, at)  # pyright: ignore[reportGeneralTypeIssues]
    best, best_at = tl.full([TILE], -float("inf"), tl.float32), tl.zeros([TILE], tl.int32)
    # If nothing is left, q equals p up to rounding, and only rounding can cause a rejection.
    best_of_all, of_all_at = best, best_at
    for begin in range(0, vocab, TILE):
        tokens = begin + tl.arange(0, TILE)
        in_vocab = tokens < vocab
        share = tl.load(wanted + tokens, mask=in_vocab, other=0.0)
        rest = tl.where(tokens == draft, 0.0, share)
        if proposed is not None:
            rest = share - tl.load(proposed + tokens, mask=in_vocab, other=0.0)
        noise = gumbel(tokens, key_0, key_1)
        score, of_all = _log(rest) + noise, _log(share) + noise
        best_at = tl.where(score > best, tokens, best_at)
        best = tl.maximum(best, score)
        of_all_at = tl.where(of_all > best_of_all, tokens, of_all_at)
        best_of_all = tl.maximum(best_of_all, of_all)
    token = _first_best(best_of_all, of_all_at, vocab)
    if tl.max(best, axis=0) > -float("inf"):
        token = _first_best(best, best_at, vocab)
    tl.store(token_ids + row, tl.where(kept, draft, token.to(tl.int64)))
    tl.store(is_kept + row, kept)


@triton.jit
def _draw_kernel(
    token_ids, shares, seeds, positions, vocab, STREAM: tl.constexpr, TILE: tl.constexpr
):
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    seed, at = tl.load(seeds + row), tl.load(positions + row) + STREAM
    key_0, key_1 = position_keys(seed, at)  # pyright: ignore[reportGeneralTypeIssues]
    best, best_at = tl.full([TILE], -float("inf"), tl.float32), tl.zeros([TILE], tl.int32)
    for begin in range(0, vocab, TILE):
        tokens = begin + tl.arange(0, TILE)
        share = tl.load(shares + row * vocab + tokens, mask=tokens < vocab, other=0.0)
        score = _log(share) + gumbel(tokens, key_0, key_1)
        best_at = tl.where(score > best, tokens, best_at)
        best = tl.maximum(best, score)
    tl.store(token_ids + row, _first_best(best, best_at, vocab).to(tl.int64))


@triton.jit
def _log(share):
    """Return the logarithm of a probability; -inf for 0."""
    return tl.where(share > 0.0, tl.log(tl.where(share > 0.0, share, 1.0)), -float("inf"))


@triton.jit
def _first_best(scores, tokens, vocab):
    return tl.min(tl.where(scores == tl.max(scores, axis=0), tokens, vocab - 1), axis=0)

"""The full distribution that a sampling step samples from, to verify drafts.

    bias kernel ─► adjust kernel [rows x pieces] ─► floor kernel [rows] ─► shares kernel
                                                    truncated rows: search    [rows x pieces]

Sampling needs no threshold for top-p (``kernels/triton/sampling.py``), but a distribution does: its
cutoff is found by the same search as the k-th logit, by mass instead of count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.sampling import LogitBias, SamplingTable, TokenCounts
from kernels.triton.launch import launch, power_of_2, wait_for_prior_kernels
from kernels.triton.sampling import (
    PIECE,
    PIECE_CHUNKS,
    adjust_logits,
    best_of_pieces,
    load_truncation,
    range_of_pieces,
)
from kernels.triton.truncation import (
    TILE_CHUNKS,
    bounds,
    find_threshold,
    is_bounded,
    kth_floor,
    likely_bound,
    list_chunks,
    mass_above,
    next_below,
)


def distribution(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: SamplingTable,
    counts: TokenCounts | None = None,
    bias: LogitBias | None = None,
    masks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``kernels.reference.sampling_step.distribution``."""
    num_rows, vocab = logits.shape
    pieces = adjust_logits(
        logits, logits, slots, positions, table, counts, bias, masks, has_noise=False
    )
    floats = [torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(3)]
    token_ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    kept = RowsKept(floats[0], floats[1], floats[2], token_ids)
    launch(
        _floor_kernel,
        (num_rows,),
        *kept,
        logits,
        *pieces.numbers,
        *pieces[1:],
        slots,
        table.temperature,
        table.top_k,
        table.top_p,
        table.min_p,
        vocab,
        pieces.num_pieces,
        PIECES=power_of_2(pieces.num_pieces),
        CHUNKS=PIECE_CHUNKS,
        num_warps=8,
    )
    shares = torch.empty_like(logits)
    launch(
        _shares_kernel,
        (num_rows, pieces.num_pieces),
        shares,
        logits,
        *kept,
        vocab,
        PIECE=PIECE,
        num_warps=4,
    )
    return shares


class RowsKept(NamedTuple):
    """What truncation keeps of each row, [rows]."""

    cut: torch.Tensor  # float32, logits above it are kept
    high: torch.Tensor  # float32, the largest logit
    mass: torch.Tensor  # float32, of those kept, in units of exp(high); 0: one-hot
    token: torch.Tensor  # int32, the likeliest


@triton.jit
def _floor_kernel(
    cuts,
    highs,
    kept_masses,
    token_ids,
    logits,
    best_scores,
    highest,
    lowest,
    masses,
    best_ids,
    maxima,
    listed,
    slots,
    temperature,
    top_k,
    top_p,
    min_p,
    vocab,
    num_pieces,
    PIECES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One row: what truncation keeps."""
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    warmth = tl.load(temperature + slot)
    k, p, m = load_truncation(  # pyright: ignore[reportGeneralTypeIssues]
        slot, top_k, top_p, min_p
    )
    token, high, is_good = best_of_pieces(  # pyright: ignore[reportGeneralTypeIssues]
        row, best_scores, highest, best_ids, vocab, num_pieces, PIECES
    )
    cut, mass = high, tl.zeros([], tl.float32)
    if is_good & (warmth > 0.0):
        has_bound = is_bounded(k, m, vocab)
        # A nucleus often is in a tile of chunks.
        wanted = tl.where(has_bound, k, TILE_CHUNKS // 2)
        low, low_maximum, mass = range_of_pieces(  # pyright: ignore[reportGeneralTypeIssues]
            row, highest, lowest, masses, wanted, high, num_pieces, PIECES
        )
        cut = next_below(low)
        if has_bound | (p < 1.0):
            num_maxima = num_pieces * CHUNKS
            logits += row * vocab
            maxima += row * num_maxima
            listed += row * num_maxima
            if has_bound:
                floor, bound = bounds(  # pyright: ignore[reportGeneralTypeIssues]
                    maxima, k, m, low, high, low_maximum, vocab, num_maxima
                )
            else:
                floor = low
                bound = likely_bound(maxima, wanted, low, high, low_maximum, num_maxima)
            num_chunks = list_chunks(maxima, listed, bound, num_maxima)
            if has_bound:
                floor = kth_floor(logits, listed, num_chunks, k, floor, bound, high, vocab)
                mass = mass_above(logits, listed, num_chunks, next_below(floor), high, vocab)
            elif mass_above(logits, listed, num_chunks, next_below(bound), high, vocab) < p * mass:
                num_chunks = list_chunks(maxima, listed, floor, num_maxima)
            else:
                floor = bound
            if p < 1.0:
                floor = find_threshold(
                    logits, listed, num_chunks, p * mass, 0.0, floor, high, vocab, True
                )
                mass = mass_above(logits, listed, num_chunks, next_below(floor), high, vocab)
            cut = next_below(floor)
    tl.store(cuts + row, cut)
    tl.store(highs + row, high)
    tl.store(kept_masses + row, mass)
    tl.store(token_ids + row, token)


@triton.jit
def _shares_kernel(shares, logits, cuts, highs, kept_masses, token_ids, vocab, PIECE: tl.constexpr):
    """One piece of one row: the softmax over what truncation keeps, or one-hot."""
    wait_for_prior_kernels()
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = piece * PIECE + tl.arange(0, PIECE)
    in_vocab = tokens < vocab
    mass = tl.load(kept_masses + row)
    share = (tokens == tl.load(token_ids + row)).to(tl.float32)
    if mass > 0.0:
        x = tl.load(logits + row * vocab + tokens, mask=in_vocab, other=-float("inf"))
        weight = tl.exp(x - tl.load(highs + row)) / mass
        share = tl.where(x > tl.load(cuts + row), weight, 0.0)
    tl.store(shares + row * vocab + tokens, share, mask=in_vocab)

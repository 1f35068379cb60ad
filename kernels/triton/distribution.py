"""The full distribution that a sampling step samples from, to verify drafts.

    bias kernel ─► adjust kernel [rows x pieces of the vocabulary] ─► shares kernel [rows]

Sampling needs no threshold (``kernels/triton/sampling.py``), but a distribution does: top-p's
cutoff is found by the same search as the k-th logit, by mass instead of count.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sampling import LogitBias, SamplingTable, TokenCounts
from kernels.triton.launch import launch, power_of_2, wait_for_prior_kernels
from kernels.triton.sampling import SEARCH_TILE, adjust_logits, best_of_pieces
from kernels.triton.truncation import nucleus_floor, truncation_floor


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
    pieces = adjust_logits(logits, logits, None, slots, positions, table, counts, bias, masks)
    shares = torch.empty_like(logits)
    launch(
        _shares_kernel,
        (num_rows,),
        shares,
        logits,
        *pieces.summaries,
        pieces.best_ids,
        pieces.is_broken,
        slots,
        table.temperature,
        table.top_k,
        table.top_p,
        table.min_p,
        vocab,
        pieces.num_pieces,
        PIECES=power_of_2(pieces.num_pieces),
        TILE=SEARCH_TILE,
        num_warps=16,
    )
    return shares


@triton.jit
def _shares_kernel(
    shares,
    logits,
    best_scores,
    highest,
    lowest,
    best_ids,
    is_broken,
    slots,
    temperature,
    top_k,
    top_p,
    min_p,
    vocab,
    num_pieces,
    PIECES: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row: the softmax over what truncation keeps, or one-hot on its likeliest token."""
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    token, low, high, is_good = best_of_pieces(  # pyright: ignore[reportGeneralTypeIssues]
        row, best_scores, highest, lowest, best_ids, is_broken, vocab, num_pieces, PIECES
    )
    is_drawn = is_good & (tl.load(temperature + slot) > 0.0)
    logits += row * vocab
    floor, mass = low, tl.full([], 1.0, tl.float32)
    if is_drawn:
        floor = truncation_floor(
            logits, tl.load(top_k + slot), tl.load(min_p + slot), low, high, vocab, TILE
        )
        p = tl.load(top_p + slot)
        if p < 1.0:
            floor = nucleus_floor(logits, p, floor, high, vocab, TILE)
        masses = tl.zeros([TILE], tl.float32)
        for begin in range(0, vocab, TILE):
            tokens = begin + tl.arange(0, TILE)
            x = tl.load(logits + tokens, mask=tokens < vocab, other=-float("inf"))
            masses += tl.where(x >= floor, tl.exp(x - high), 0.0)
        mass = tl.sum(masses, axis=0)
    for begin in range(0, vocab, TILE):
        tokens = begin + tl.arange(0, TILE)
        in_vocab = tokens < vocab
        share = (tokens == token).to(tl.float32)
        if is_drawn:
            x = tl.load(logits + tokens, mask=in_vocab, other=-float("inf"))
            share = tl.where(x >= floor, tl.exp(x - high) / mass, 0.0)
        tl.store(shares + row * vocab + tokens, share, mask=in_vocab)

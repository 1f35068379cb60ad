"""A sampling step without a sort and without synchronising with the host.

    bias kernel ─► adjust kernel [rows x pieces of the vocabulary] ─► choose kernel [rows]
                   penalties, grammar, temperature, noise;             the best piece;
                   the best of each piece                              truncated rows: search

Gumbel-max (Gumbel 1954): the token with the largest ``logit + noise`` is a sample from the softmax,
and among the tokens that truncation keeps it is a sample from the truncated one. So no threshold is
needed: the best token of all is kept or not, which depends on the number and the mass of likelier
tokens; if not, the cutoff is above it, and the next candidate is the best among the likelier ones.
Each attempt is one pass over the row. The noise is the same each time, so the result is exactly
that of sorting. (The rejection sampling in FlashInfer draws new noise instead.) Only if top-p
follows top-k must the k-th logit itself be found, by a search with several pivots per pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.sampling import LogitBias, SamplerOutput, SamplingTable, TokenCounts
from kernels.triton.launch import launch, power_of_2, wait_for_prior_kernels
from kernels.triton.noise import gumbel, position_keys
from kernels.triton.truncation import sample_truncated

_PIECE = 4096  # of the vocabulary, per program
SEARCH_TILE = 4096
_BIAS_TILE = 128
_ALIGNED = 4  # floats


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: SamplingTable,
    counts: TokenCounts | None = None,
    bias: LogitBias | None = None,
    masks: torch.Tensor | None = None,
    out: SamplerOutput | None = None,
) -> SamplerOutput:
    """Sample a token for each row; see ``kernels.reference.sampling_step.sample``."""
    num_rows, vocab = logits.shape
    raw = logits if bias is None else logits.float()  # a bias is added in place
    # Only written for truncated rows.
    scores = torch.empty_like(raw, dtype=torch.float32)
    logits = raw if raw.dtype == torch.float32 else torch.empty_like(scores)
    pieces = adjust_logits(raw, logits, scores, slots, positions, table, counts, bias, masks)
    if out is None:
        out = SamplerOutput.empty(num_rows, logits.device)
    launch(
        _choose_kernel,
        (num_rows,),
        *out,
        logits,
        scores,
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
    return out


class PieceSummaries(NamedTuple):
    """Summaries of each piece of each row, after its logits are adjusted."""

    # [3, at least rows * pieces] float32: the best score, the highest and the lowest logit
    summaries: torch.Tensor
    best_ids: torch.Tensor  # [rows, pieces] int32, the token with the best score
    is_broken: torch.Tensor  # [rows, pieces] int8

    @property
    def num_pieces(self) -> int:
        """Pieces per row."""
        return self.best_ids.shape[1]


def adjust_logits(
    raw: torch.Tensor,
    logits: torch.Tensor,
    scores: torch.Tensor | None,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: SamplingTable,
    counts: TokenCounts | None,
    bias: LogitBias | None,
    masks: torch.Tensor | None,
) -> PieceSummaries:
    """Apply bias, penalties, masks and temperature; add noise if there is room for ``scores``.

    A bias is added to the ``raw`` logits in place. ``logits``, which may be the same tensor,
    receives logits over temperature for truncated rows. Without ``scores`` there is no noise, and
    it receives them for all rows that are not greedy. Other rows are undefined.
    """
    num_rows, vocab = raw.shape
    device = raw.device
    num_pieces = -(-vocab // _PIECE)
    # Each begins at a multiple of 16 bytes for any number of rows: other alignments compile again.
    num_summaries = -(-num_rows * num_pieces // _ALIGNED) * _ALIGNED
    pieces = PieceSummaries(
        torch.empty((3, num_summaries), dtype=torch.float32, device=device),
        torch.empty((num_rows, num_pieces), dtype=torch.int32, device=device),
        torch.empty((num_rows, num_pieces), dtype=torch.int8, device=device),
    )
    if bias is not None:
        launch(
            _bias_kernel,
            (num_rows,),
            raw,
            slots,
            positions,
            table.bias_begin,
            table.bias_end,
            *bias,
            vocab,
            TILE=_BIAS_TILE,
            num_warps=1,
        )
    launch(
        _adjust_kernel,
        (num_rows, num_pieces),
        raw,
        logits,
        scores,
        *pieces.summaries,
        pieces.best_ids,
        pieces.is_broken,
        slots,
        positions,
        table.temperature,
        table.top_k,
        table.top_p,
        table.min_p,
        table.presence,
        table.frequency,
        table.repetition,
        table.seed,
        table.count_line,
        table.mask_line,
        None if counts is None else counts.output,
        None if counts is None else counts.prompt,
        masks,
        0 if masks is None else masks.stride(0),
        vocab,
        PIECE=_PIECE,
        num_warps=8,
    )
    return pieces


@triton.jit
def _bias_kernel(
    logits,
    slots,
    positions,
    bias_begin,
    bias_end,
    token_ids,
    values,
    until,
    vocab,
    TILE: tl.constexpr,
):
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    end = tl.load(bias_end + slot)
    for begin in range(tl.load(bias_begin + slot), end, TILE):
        entries = begin + tl.arange(0, TILE)
        in_row = entries < end
        is_added = in_row & (position < tl.load(until + entries, mask=in_row, other=0))
        token = tl.load(token_ids + entries, mask=is_added, other=0)
        value = tl.load(values + entries, mask=is_added, other=0.0)
        # Atomic, because a token may be both biased and banned; in either order it ends at -inf.
        tl.atomic_add(logits + row * vocab + token, value, mask=is_added, sem="relaxed")


@triton.jit
def is_truncated(slot, top_k, top_p, min_p, vocab):
    """Return whether a request samples from a truncated distribution."""
    k = tl.load(top_k + slot)
    has_k = (k > 0) & (k < vocab)
    return has_k | (tl.load(top_p + slot) < 1.0) | (tl.load(min_p + slot) > 0.0)


# With drafts, both are slices of one transfer, with any alignment.
@triton.jit(do_not_specialize_on_alignment=["mask_line", "masks"])
def _adjust_kernel(
    raw,
    logits,
    scores,
    best_scores,  # [rows, pieces] flat, like the next four
    highest,
    lowest,  # of the finite ones
    best_ids,
    is_broken,
    slots,
    positions,
    temperature,
    top_k,
    top_p,
    min_p,
    presence,
    frequency,
    repetition,
    seed,
    count_line,
    mask_line,
    counts,
    in_prompt,
    masks,
    mask_stride,
    vocab,
    PIECE: tl.constexpr,
):
    """One piece of one row; its logits are written if a search will read them again."""
    wait_for_prior_kernels()
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    tokens = piece * PIECE + tl.arange(0, PIECE)
    in_vocab = tokens < vocab
    place = row * vocab + tokens
    x = tl.load(raw + place, mask=in_vocab, other=-float("inf")).to(tl.float32)
    if counts is not None:
        line = tl.load(count_line + slot).to(tl.int64)
        if line >= 0:
            at = line * vocab + tokens
            count = tl.load(counts + at, mask=in_vocab, other=0)
            is_seen = (count > 0) | (tl.load(in_prompt + at, mask=in_vocab, other=0) != 0)
            factor = tl.where(is_seen, tl.load(repetition + slot), 1.0)
            x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
            x -= count.to(tl.float32) * tl.load(frequency + slot)
            x -= tl.where(count > 0, tl.load(presence + slot), 0.0)
    if masks is not None:
        line = tl.load(mask_line + slot).to(tl.int64)
        if line >= 0:
            words = masks + line * mask_stride + tokens // 32
            is_allowed = (tl.load(words, mask=in_vocab, other=0) >> (tokens % 32)) & 1
            x = tl.where(is_allowed != 0, x, -float("inf"))
    broken = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), axis=0)
    score = x
    warmth = tl.load(temperature + slot)
    if (warmth > 0.0) & (broken == 0):
        x = tl.div_rn(x, warmth)
        score = x
        if scores is None:
            tl.store(logits + place, x, mask=in_vocab)
        else:
            key_0, key_1 = position_keys(tl.load(seed + slot), tl.load(positions + row))
            score = x + gumbel(tokens, key_0, key_1)
            if is_truncated(slot, top_k, top_p, min_p, vocab):
                tl.store(logits + place, x, mask=in_vocab)
                tl.store(scores + place, score, mask=in_vocab)
    summary = row * tl.num_programs(1) + piece
    best = tl.max(score, axis=0)
    tl.store(best_scores + summary, best)
    first = tl.min(tl.where((score == best) & in_vocab, tokens, vocab - 1), axis=0)
    tl.store(best_ids + summary, first)
    tl.store(highest + summary, tl.max(x, axis=0))
    is_low = x > -float("inf")
    tl.store(lowest + summary, tl.min(tl.where(is_low, x, float("inf")), axis=0))
    tl.store(is_broken + summary, broken.to(tl.int8))


@triton.jit
def best_of_pieces(
    row,
    best_scores,
    highest,
    lowest,
    best_ids,
    is_broken,
    vocab,
    num_pieces,
    PIECES: tl.constexpr,
):
    """Summarise one row: place of the best score, range of finite logits, validity."""
    pieces = tl.arange(0, PIECES)
    in_row = pieces < num_pieces
    at = row * num_pieces + pieces
    score = tl.load(best_scores + at, mask=in_row, other=-float("inf"))
    ids = tl.load(best_ids + at, mask=in_row, other=vocab - 1)
    high = tl.max(tl.load(highest + at, mask=in_row, other=-float("inf")), axis=0)
    low = tl.min(tl.load(lowest + at, mask=in_row, other=float("inf")), axis=0)
    broken = tl.max(tl.load(is_broken + at, mask=in_row, other=0).to(tl.int32), axis=0)
    token = tl.min(tl.where(score == tl.max(score, axis=0), ids, vocab - 1), axis=0)
    return token, low, high, (broken == 0) & (high > -float("inf"))


@triton.jit
def _choose_kernel(
    token_ids,
    is_finite,
    logits,
    scores,
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
    """One row: the best of its pieces, and for a truncated row the best of the kept tokens."""
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    token, low, high, is_good = best_of_pieces(  # pyright: ignore[reportGeneralTypeIssues]
        row, best_scores, highest, lowest, best_ids, is_broken, vocab, num_pieces, PIECES
    )
    is_drawn = is_good & (tl.load(temperature + slot) > 0.0)
    if is_drawn & is_truncated(slot, top_k, top_p, min_p, vocab):
        token = sample_truncated(
            logits + row * vocab,
            scores + row * vocab,
            tl.load(top_k + slot),
            tl.load(top_p + slot),
            tl.load(min_p + slot),
            low,
            high,
            vocab,
            TILE,
        )
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(is_finite + row, is_good)

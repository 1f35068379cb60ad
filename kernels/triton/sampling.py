"""A sampling step without a sort and without synchronising with the host.

    bias kernel ─► adjust kernel [rows x pieces of the vocabulary] ─► choose kernel [rows]
                   penalties, grammar, temperature, noise;             the best piece;
                   the best of each piece, maxima of chunks            truncated rows: search

Gumbel-max (Gumbel 1954): the token with the largest ``logit + noise`` is a sample from the softmax,
and among the tokens that truncation keeps it is a sample from the truncated one. So top-p needs no
threshold: the best token of all is kept or not, which depends on the mass of likelier tokens; if
not, the cutoff is above it, and the next candidate is the best among the likelier ones. The noise
is the same each time, so the result is exactly that of sorting. (The rejection sampling in
FlashInfer draws new noise instead.) Few tokens are likelier, and few are kept by top-k or min-p;
``kernels/triton/truncation.py`` reads only the chunks of the vocabulary that may have some.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.sampling import LogitBias, SamplerOutput, SamplingTable, TokenCounts
from kernels.triton.launch import launch, power_of_2, wait_for_prior_kernels
from kernels.triton.noise import gumbel, position_keys
from kernels.triton.tiles import quotient
from kernels.triton.truncation import CHUNK, is_bounded, sample_truncated, two_maxima

PIECE = 2048  # of the vocabulary, per program
PIECE_CHUNKS = PIECE // CHUNK.value
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
    logits = raw if raw.dtype == torch.float32 else torch.empty_like(raw, dtype=torch.float32)
    pieces = adjust_logits(
        raw, logits, slots, positions, table, counts, bias, masks, has_noise=True
    )
    if out is None:
        out = SamplerOutput.empty(num_rows, logits.device)
    launch(
        _choose_kernel,
        (num_rows,),
        *out,
        logits,
        *pieces.numbers,
        *pieces[1:],
        slots,
        positions,
        table.temperature,
        table.top_k,
        table.top_p,
        table.min_p,
        table.seed,
        vocab,
        pieces.num_pieces,
        PIECES=power_of_2(pieces.num_pieces),
        CHUNKS=PIECE_CHUNKS,
        num_warps=8,
    )
    return out


class PieceSummaries(NamedTuple):
    """Summaries of each piece of each row, after its logits are adjusted."""

    # [4, at least rows * pieces] float32: the best score; the highest logit, inf if any is nan or
    # inf, or becomes so over the temperature; the lowest finite one; the mass in units of
    # exp(highest). The last two are undefined for rows without a search.
    numbers: torch.Tensor
    best_ids: torch.Tensor  # [rows, pieces] int32, the token with the best score
    maxima: torch.Tensor  # [rows, chunks] float32, likewise; past the vocabulary -inf
    listed: torch.Tensor  # [rows, chunks] int32, memory for a search

    @property
    def num_pieces(self) -> int:
        """Pieces per row."""
        return self.best_ids.shape[1]


def adjust_logits(
    raw: torch.Tensor,
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: SamplingTable,
    counts: TokenCounts | None,
    bias: LogitBias | None,
    masks: torch.Tensor | None,
    *,
    has_noise: bool,
) -> PieceSummaries:
    """Apply bias, penalties, masks and temperature, and noise in the scores if it is wanted.

    A bias is added to the ``raw`` logits in place. ``logits``, which may be the same tensor,
    receives logits over temperature for truncated rows; without noise, for all rows that are not
    greedy. Other rows are undefined. Rows that top_k or min_p truncates have no noise, either.
    """
    num_rows, vocab = raw.shape
    device = raw.device
    num_pieces = -(-vocab // PIECE)
    # Each begins at a multiple of 16 bytes for any number of rows: other alignments compile again.
    num_summaries = -(-num_rows * num_pieces // _ALIGNED) * _ALIGNED
    chunks = (num_rows, num_pieces * PIECE_CHUNKS)
    pieces = PieceSummaries(
        torch.empty((4, num_summaries), dtype=torch.float32, device=device),
        torch.empty((num_rows, num_pieces), dtype=torch.int32, device=device),
        torch.empty(chunks, dtype=torch.float32, device=device),
        torch.empty(chunks, dtype=torch.int32, device=device),
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
        *pieces.numbers,
        pieces.best_ids,
        pieces.maxima,
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
        PIECE=PIECE,
        CHUNKS=PIECE_CHUNKS,
        HAS_NOISE=has_noise,
        num_warps=4,
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
def load_truncation(slot, top_k, top_p, min_p):
    """Return a request's top_k, top_p and min_p."""
    return tl.load(top_k + slot), tl.load(top_p + slot), tl.load(min_p + slot)


# With drafts, both are slices of one transfer, with any alignment.
@triton.jit(do_not_specialize_on_alignment=["mask_line", "masks"])
def _adjust_kernel(
    raw,
    logits,
    best_scores,  # [rows, pieces] flat, like the next four: see PieceSummaries
    highest,
    lowest,
    masses,
    best_ids,
    maxima,  # [rows, chunks] flat
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
    CHUNKS: tl.constexpr,
    HAS_NOISE: tl.constexpr,
):
    """One piece of one row; its logits are written if a search will read them again."""
    wait_for_prior_kernels()
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    # All that is read of a request is asked for at once.
    warmth = tl.load(temperature + slot)
    k, p, m = load_truncation(  # pyright: ignore[reportGeneralTypeIssues]
        slot, top_k, top_p, min_p
    )
    request_seed, position = tl.load(seed + slot), tl.load(positions + row)
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
    summary = row * tl.num_programs(1) + piece
    high, is_nan = two_maxima(  # pyright: ignore[reportGeneralTypeIssues]
        x, (x != x).to(tl.float32)
    )
    broken = (is_nan > 0.0) | (high == float("inf"))
    best, score = high, x
    if (warmth > 0.0) & (broken == 0):
        x = quotient(x, warmth)
        high = quotient(high, warmth)  # the same number: quotients are in the order of dividends
        best, score = high, x
        has_bound = is_bounded(k, m, vocab)
        is_searched = True
        if HAS_NOISE:
            is_searched = has_bound | (p < 1.0)
            if has_bound == 0:
                key_0, key_1 = position_keys(request_seed, position)
                score = x + gumbel(tokens, key_0, key_1)
                best = tl.max(score, axis=0)
        if is_searched:
            tl.store(logits + place, x, mask=in_vocab)
            chunk = row * tl.num_programs(1) * CHUNKS + piece * CHUNKS + tl.arange(0, CHUNKS)
            tl.store(maxima + chunk, tl.max(tl.reshape(x, [CHUNKS, PIECE // CHUNKS]), axis=1))
            low = tl.min(tl.where(x > -float("inf"), x, float("inf")), axis=0)
            tl.store(lowest + summary, low)
            mass = 0.0
            if has_bound == 0:
                finite = tl.where(high > -float("inf"), high, 0.0)
                mass = tl.sum(tl.exp(x - finite), axis=0)
            tl.store(masses + summary, mass)
    tl.store(best_scores + summary, best)
    # Past the vocabulary all is -inf, and the piece begins before.
    tl.store(best_ids + summary, tl.min(tl.where(score == best, tokens, vocab - 1), axis=0))
    tl.store(highest + summary, tl.where(broken, float("inf"), high))


@triton.jit
def best_of_pieces(
    row,
    best_scores,
    highest,
    best_ids,
    vocab,
    num_pieces,
    PIECES: tl.constexpr,
):
    """Summarise one row: the token with the best score, the largest logit, validity."""
    pieces = tl.arange(0, PIECES)
    in_row = pieces < num_pieces
    at = row * num_pieces + pieces
    score = tl.load(best_scores + at, mask=in_row, other=-float("inf"))
    tops = tl.load(highest + at, mask=in_row, other=-float("inf"))
    ids = tl.load(best_ids + at, mask=in_row, other=vocab - 1)
    best, high = two_maxima(score, tops)  # pyright: ignore[reportGeneralTypeIssues]
    token = tl.min(tl.where(score == best, ids, vocab - 1), axis=0)
    return token, high, tl.abs(high) < float("inf")


@triton.jit
def range_of_pieces(row, highest, lowest, masses, wanted, high, num_pieces, PIECES: tl.constexpr):
    """Summarise one row with a search: its smallest finite logit, a value that ``wanted`` chunks'
    maxima reach if a better one is known, and its mass in units of ``exp(high)``.

    The mass is 0 if top_k or min_p truncates the row.
    """
    pieces = tl.arange(0, PIECES)
    in_row = pieces < num_pieces
    at = row * num_pieces + pieces
    lows = tl.load(lowest + at, mask=in_row, other=float("inf"))
    tops = tl.load(highest + at, mask=in_row, other=-float("inf"))
    is_some = tops > -float("inf")
    mass = tl.load(masses + at, mask=is_some, other=0.0)
    everything = tl.sum(mass * tl.exp(tops - high), axis=0)
    num_some = tl.sum(is_some.to(tl.int32), axis=0)
    low, low_maximum = two_maxima(  # pyright: ignore[reportGeneralTypeIssues]
        -lows, tl.where(is_some, -tops, -float("inf"))
    )
    return -low, -tl.where(num_some >= wanted, low_maximum, low), everything


@triton.jit
def _choose_kernel(
    token_ids,
    is_finite,
    logits,
    best_scores,
    highest,
    lowest,
    masses,
    best_ids,
    maxima,
    listed,
    slots,
    positions,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    vocab,
    num_pieces,
    PIECES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One row: the best of its pieces, and for a truncated row the best of the kept tokens."""
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    warmth = tl.load(temperature + slot)
    k, p, m = load_truncation(  # pyright: ignore[reportGeneralTypeIssues]
        slot, top_k, top_p, min_p
    )
    request_seed, position = tl.load(seed + slot), tl.load(positions + row)
    token, high, is_good = best_of_pieces(  # pyright: ignore[reportGeneralTypeIssues]
        row, best_scores, highest, best_ids, vocab, num_pieces, PIECES
    )
    if is_good & (warmth > 0.0) & (is_bounded(k, m, vocab) | (p < 1.0)):
        low, low_maximum, everything = range_of_pieces(  # pyright: ignore[reportGeneralTypeIssues]
            row, highest, lowest, masses, k, high, num_pieces, PIECES
        )
        key_0, key_1 = position_keys(request_seed, position)
        num_maxima = num_pieces * CHUNKS
        token = sample_truncated(
            logits + row * vocab,
            maxima + row * num_maxima,
            listed + row * num_maxima,
            token,
            everything,
            key_0,
            key_1,
            k,
            p,
            m,
            low,
            high,
            low_maximum,
            vocab,
            num_maxima,
        )
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(is_finite + row, is_good)

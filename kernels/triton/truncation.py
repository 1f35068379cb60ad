"""Device functions that find, in one row, the best token that min_p, top_k and top_p keep."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def draw_truncated(logits, scores, top_k, top_p, min_p, low, high, vocab, TILE: tl.constexpr):
    """Index of the best score among the kept tokens of a row.

    min_p, then top_k, then top_p of what those left; all keep what is at or above some logit,
    and equal logits share their fate. See ``kernels.reference.sampling.truncation_threshold``.

    Args:
        logits, scores: of the row; scores are logits with noise.
        top_k, top_p, min_p: scalars.
        low, high: the row's smallest and largest finite logit.
        vocab: the row's length.
        TILE: tokens looked at together.
    """
    floor = low
    if min_p > 0.0:
        floor = tl.maximum(low, high + tl.log(min_p))
    if (top_k > 0) & (top_k < vocab):
        floor = tl.maximum(floor, _kth_largest(logits, top_k, low, high, vocab, TILE))
    everything, token = _survey(  # pyright: ignore[reportGeneralTypeIssues]
        logits, scores, floor, high, vocab, False, TILE
    )
    if top_p < 1.0:
        wanted = top_p * everything
        likelier, following = _survey(
            logits, scores, tl.load(logits + token), high, vocab, True, TILE
        )
        # Not among the likeliest that make up the share: the cut lies above this token.
        while (likelier >= wanted) & (likelier > 0.0):
            token = following
            likelier, following = _survey(
                logits, scores, tl.load(logits + token), high, vocab, True, TILE
            )
    return token


@triton.jit
def _survey(logits, scores, cut, high, vocab, STRICT: tl.constexpr, TILE: tl.constexpr):
    """Mass, in units of ``exp(high)``, and best token of the logits above (or at) a cut."""
    mass = tl.zeros([TILE], tl.float32)
    best = tl.full([TILE], -float("inf"), tl.float32)
    best_at = tl.zeros([TILE], tl.int32)
    for begin in range(0, vocab, TILE):
        tokens = begin + tl.arange(0, TILE)
        x = tl.load(logits + tokens, mask=tokens < vocab, other=-float("inf"))
        is_above = (x > cut) if STRICT else (x >= cut)
        score = tl.load(scores + tokens, mask=is_above, other=-float("inf"))
        mass += tl.where(is_above, tl.exp(x - high), 0.0)
        is_better = score > best
        best = tl.where(is_better, score, best)
        best_at = tl.where(is_better, tokens, best_at)
    top = tl.max(best, axis=0)
    return tl.sum(mass, axis=0), tl.min(tl.where(best == top, best_at, vocab - 1), axis=0)


@triton.jit
def _kth_largest(logits, k, low, high, vocab, TILE: tl.constexpr):
    """The k-th largest logit, or the smallest finite one where there are fewer.

    Four pivots cut the range in five with each pass; it is found once one logit alone, however
    often it comes, lies in the range. Every float between two others is a pivot in the end, so
    that happens.
    """
    above = tl.full([], float("inf"), tl.float32)  # the k-th lies in [low, above)
    kth = high
    is_found = low == high
    while is_found == 0:
        step = (tl.minimum(above, high) - low) * 0.2
        pivot_1 = low + step
        pivot_2 = low + 2.0 * step
        pivot_3 = low + 3.0 * step
        pivot_4 = low + 4.0 * step
        count_1 = tl.zeros([TILE], tl.int32)
        count_2 = tl.zeros([TILE], tl.int32)
        count_3 = tl.zeros([TILE], tl.int32)
        count_4 = tl.zeros([TILE], tl.int32)
        least = tl.full([TILE], float("inf"), tl.float32)
        most = tl.full([TILE], -float("inf"), tl.float32)
        for begin in range(0, vocab, TILE):
            tokens = begin + tl.arange(0, TILE)
            x = tl.load(logits + tokens, mask=tokens < vocab, other=-float("inf"))
            count_1 += (x >= pivot_1).to(tl.int32)
            count_2 += (x >= pivot_2).to(tl.int32)
            count_3 += (x >= pivot_3).to(tl.int32)
            count_4 += (x >= pivot_4).to(tl.int32)
            least = tl.minimum(least, tl.where(x >= low, x, float("inf")))
            most = tl.maximum(most, tl.where(x < above, x, -float("inf")))
        kth = tl.min(least, axis=0)
        is_found = kth == tl.max(most, axis=0)
        # Up to a pivot with k logits or more at or above it, down from one with fewer.
        is_1 = tl.sum(count_1, axis=0) >= k
        is_2 = tl.sum(count_2, axis=0) >= k
        is_3 = tl.sum(count_3, axis=0) >= k
        is_4 = tl.sum(count_4, axis=0) >= k
        above = tl.where(is_4, above, pivot_4)
        above = tl.where(is_3, above, pivot_3)
        above = tl.where(is_2, above, pivot_2)
        above = tl.where(is_1, above, pivot_1)
        low = tl.where(is_1, pivot_1, low)
        low = tl.where(is_2, pivot_2, low)
        low = tl.where(is_3, pivot_3, low)
        low = tl.where(is_4, pivot_4, low)
    return kth

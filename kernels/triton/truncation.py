"""Device functions that find a row's best token among those kept by min_p, top_k and top_p."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sample_truncated(logits, scores, top_k, top_p, min_p, low, high, vocab, TILE: tl.constexpr):
    """Return the index of the best score among the kept tokens of a row.

    min_p applies first, then top_k, then top_p to what those left. All keep the logits at or above
    some value, and equal logits are kept or dropped together. See
    ``kernels.reference.sampling.truncation_threshold``.

    Args:
        logits, scores: of the row; scores are logits plus noise.
        top_k, top_p, min_p: scalars.
        low, high: the row's smallest and largest finite logit.
        vocab: the row's length.
        TILE: tokens per iteration.
    """
    floor = truncation_floor(logits, top_k, min_p, low, high, vocab, TILE)
    everything, token = _mass_and_best(  # pyright: ignore[reportGeneralTypeIssues]
        logits, scores, floor, high, vocab, False, TILE
    )
    if top_p < 1.0:
        wanted = top_p * everything
        likelier, following = _mass_and_best(
            logits, scores, tl.load(logits + token), high, vocab, True, TILE
        )
        # Not among the likeliest that make up the share: the cutoff is above this token.
        while (likelier >= wanted) & (likelier > 0.0):
            token = following
            likelier, following = _mass_and_best(
                logits, scores, tl.load(logits + token), high, vocab, True, TILE
            )
    return token


@triton.jit
def truncation_floor(logits, top_k, min_p, low, high, vocab, TILE: tl.constexpr):
    """Return the smallest logit of a row that min_p and top_k keep."""
    floor = low
    if min_p > 0.0:
        floor = tl.maximum(low, high + tl.log(min_p))
    if (top_k > 0) & (top_k < vocab):
        kth = _find_threshold(logits, top_k.to(tl.float32), low, high, vocab, False, TILE)
        floor = tl.maximum(floor, kth)
    return floor


@triton.jit
def nucleus_floor(logits, top_p, floor, high, vocab, TILE: tl.constexpr):
    """Return the smallest logit of a row that top_p keeps among those at or above ``floor``."""
    # The same sum twice in the same order: the total is never less than a share of it.
    mass = tl.zeros([TILE], tl.float32)
    least = tl.full([TILE], float("inf"), tl.float32)
    for begin in range(0, vocab, TILE):
        tokens = begin + tl.arange(0, TILE)
        x = tl.load(logits + tokens, mask=tokens < vocab, other=-float("inf"))
        mass += tl.where(x >= floor, tl.exp(x - high), 0.0)
        least = tl.minimum(least, tl.where(x >= floor, x, float("inf")))
    wanted = top_p * tl.sum(mass, axis=0)
    return _find_threshold(logits, wanted, tl.min(least, axis=0), high, vocab, True, TILE)


@triton.jit
def _mass_and_best(logits, scores, cut, high, vocab, STRICT: tl.constexpr, TILE: tl.constexpr):
    """Return the mass, in units of ``exp(high)``, and best token of logits above (or at) a cut."""
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
def _find_threshold(logits, wanted, low, high, vocab, BY_MASS: tl.constexpr, TILE: tl.constexpr):
    """Return the largest logit for which the logits at or above it reach the wanted count or mass.

    It is the lowest logit if all together do not.

    Args:
        logits: of the row.
        wanted: a number of logits, or a mass in units of ``exp(high)``.
        low, high: the lowest logit that may be kept, and the row's highest.
        vocab: the row's length.
        BY_MASS: whether ``wanted`` is a mass.
        TILE: tokens per iteration.

    Each pass divides the range into five by four pivots. The search ends when the range contains a
    single logit, however often it occurs, which happens because every float between two others
    eventually becomes a pivot. It does not happen if there are fewer logits than wanted and the
    lowest two are adjacent floats, which may leave an empty range: one that cannot be divided ends
    the search as well.
    """
    above = tl.full([], float("inf"), tl.float32)  # the result is in [low, above)
    lowest = high
    is_found = low == high
    while is_found == 0:
        from_low, from_above = low, above
        # Clamped, because a range that overflows would have no pivot in it.
        step = tl.minimum((tl.minimum(above, high) - low) * 0.2, 4e37)
        pivot_1 = low + step
        pivot_2 = low + 2.0 * step
        pivot_3 = low + 3.0 * step
        pivot_4 = low + 4.0 * step
        sum_1 = tl.zeros([TILE], tl.float32)
        sum_2 = tl.zeros([TILE], tl.float32)
        sum_3 = tl.zeros([TILE], tl.float32)
        sum_4 = tl.zeros([TILE], tl.float32)
        least = tl.full([TILE], float("inf"), tl.float32)
        most = tl.full([TILE], -float("inf"), tl.float32)
        for begin in range(0, vocab, TILE):
            tokens = begin + tl.arange(0, TILE)
            x = tl.load(logits + tokens, mask=tokens < vocab, other=-float("inf"))
            # Counts are integers below 2^24, which are exact in float32.
            weight = tl.exp(x - high) if BY_MASS else 1.0
            sum_1 += tl.where(x >= pivot_1, weight, 0.0)
            sum_2 += tl.where(x >= pivot_2, weight, 0.0)
            sum_3 += tl.where(x >= pivot_3, weight, 0.0)
            sum_4 += tl.where(x >= pivot_4, weight, 0.0)
            least = tl.minimum(least, tl.where(x >= low, x, float("inf")))
            most = tl.maximum(most, tl.where(x < above, x, -float("inf")))
        lowest = tl.min(least, axis=0)
        is_found = lowest == tl.max(most, axis=0)
        # Move up to a pivot with enough at or above it, down from one with less.
        is_1 = tl.sum(sum_1, axis=0) >= wanted
        is_2 = tl.sum(sum_2, axis=0) >= wanted
        is_3 = tl.sum(sum_3, axis=0) >= wanted
        is_4 = tl.sum(sum_4, axis=0) >= wanted
        above = tl.where(is_4, above, pivot_4)
        above = tl.where(is_3, above, pivot_3)
        above = tl.where(is_2, above, pivot_2)
        above = tl.where(is_1, above, pivot_1)
        low = tl.where(is_1, pivot_1, low)
        low = tl.where(is_2, pivot_2, low)
        low = tl.where(is_3, pivot_3, low)
        low = tl.where(is_4, pivot_4, low)
        is_found = is_found | ((low == from_low) & (above == from_above))
    return lowest

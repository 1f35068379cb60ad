"""Device functions that find a row's best token among those kept by min_p, top_k and top_p.

Few tokens of a vocabulary can be kept, and they are near its maximum. So the row's *chunks*, of 64
tokens, whose largest logits are too small are ruled out first:

    maxima of the chunks ─► a bound below the threshold ─► list of chunks that reach it ─► search

The k-th largest maximum is such a bound for top_k, since k chunks then have a token each that is as
large. The list is usually one tile, which stays in the L1 cache: what counts is then the number of
block-wide reductions, one after the other. A flat distribution is a long list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.noise import gumbel

CHUNK: tl.constexpr = tl.constexpr(64)  # tokens
TILE_CHUNKS: tl.constexpr = tl.constexpr(32)
_TILE: tl.constexpr = tl.constexpr(CHUNK.value * TILE_CHUNKS.value)


@triton.jit
def sample_truncated(
    logits,
    maxima,
    chunks,
    token,
    everything,
    key_0,
    key_1,
    top_k,
    top_p,
    min_p,
    low,
    high,
    low_maximum,
    vocab,
    num_maxima,
):
    """Return the index of the best score, logit plus noise, among the kept tokens of a row.

    min_p applies first, then top_k, then top_p to what those left. All keep the logits at or above
    some value, and equal logits are kept or dropped together. See
    ``kernels.reference.sampling.truncation_threshold``.

    Args:
        logits, maxima: of the row, and of each of its chunks.
        chunks: memory for the list, ``num_maxima`` int32.
        token, everything: of all tokens, the best score's index, and the mass in units of
            ``exp(high)``; used if top_p alone truncates.
        key_0, key_1: of the noise.
        top_k, top_p, min_p: scalars.
        low, high: the row's smallest and largest finite logit.
        low_maximum: see ``likely_bound``.
        vocab, num_maxima: the lengths of ``logits`` and ``maxima``.
    """
    has_bound = is_bounded(top_k, min_p, vocab)
    if has_bound:
        floor, bound = bounds(  # pyright: ignore[reportGeneralTypeIssues]
            maxima, top_k, min_p, low, high, low_maximum, vocab, num_maxima
        )
    else:
        floor, bound = low, tl.load(logits + token)
    num_chunks = list_chunks(maxima, chunks, bound, num_maxima)
    cut = bound
    if has_bound:
        floor = kth_floor(logits, chunks, num_chunks, top_k, floor, bound, high, vocab)
        cut = next_below(floor)
    wanted = top_p * everything
    is_kept = False
    while is_kept == 0:
        # The mass of what is likelier than the token; in the first turn perhaps of all there is.
        mass = tl.zeros([], tl.float32)
        if top_p < 1.0:
            mass = mass_above(logits, chunks, num_chunks, cut, high, vocab)
        wanted = tl.where(has_bound, top_p * mass, wanted)
        is_kept = (has_bound == 0) & ((mass < wanted) | (mass <= 0.0))
        # Not among the likeliest that make up the share: the cutoff is above this token.
        if is_kept == 0:
            token = _best_above(logits, chunks, num_chunks, cut, key_0, key_1, vocab)
            cut = tl.load(logits + token)
            is_kept = top_p >= 1.0
        has_bound = False
    return token


@triton.jit
def is_bounded(top_k, min_p, vocab):
    """Return whether top_k or min_p keep few tokens, whatever the mass of the others."""
    return ((top_k > 0) & (top_k < vocab)) | (min_p > 0.0)


@triton.jit
def bounds(maxima, top_k, min_p, low, high, low_maximum, vocab, num_maxima):
    """Return the smallest logit that min_p keeps, and a bound that all kept logits reach.

    top_k may drop some logits at or above the bound. See ``sample_truncated``.
    """
    floor = low
    if min_p > 0.0:
        floor = tl.maximum(low, high + tl.log(min_p))
    bound = floor
    if (top_k > 0) & (top_k < vocab):
        bound = likely_bound(maxima, top_k, floor, high, low_maximum, num_maxima)
    return floor, bound


@triton.jit
def kth_floor(logits, chunks, num_chunks, top_k, floor, bound, high, vocab):
    """Return a value such that min_p and top_k keep the logits at or above it.

    ``chunks`` lists those with logits that reach ``bound``; see ``bounds``.
    """
    if (top_k > 0) & (top_k < vocab):
        wanted = top_k.to(tl.float32)
        floor = find_threshold(
            logits, chunks, num_chunks, wanted, wanted, bound, high, vocab, False
        )
    return floor


@triton.jit
def likely_bound(maxima, wanted, floor, high, low_maximum, num_maxima):
    """Return a value that the largest logits of ``wanted`` chunks reach, and of not many more.

    It is the floor if fewer chunks reach that.

    Args:
        maxima: of the row's chunks.
        wanted: int32.
        floor, high: the smallest logit that may be kept, and the row's largest.
        low_maximum: a value that ``wanted`` of the maxima reach, or the floor.
        num_maxima: the length of ``maxima``.
    """
    # A quarter more for an early end; what fills a tile costs nothing.
    most = tl.cdiv(wanted + wanted // 4, TILE_CHUNKS) * TILE_CHUNKS
    bound = floor
    if wanted <= num_maxima:
        bound = find_threshold(
            maxima,
            None,
            tl.cdiv(num_maxima, CHUNK),
            wanted.to(tl.float32),
            most.to(tl.float32),
            tl.maximum(floor, low_maximum),
            high,
            num_maxima,
            False,
        )
    return bound


@triton.jit
def list_chunks(maxima, chunks, bound, num_maxima):
    """List the chunks whose largest logit reaches a bound, in order; return their number.

    If it is most of them, all are counted as listed.
    """
    num_chunks = 0
    for begin in range(0, num_maxima, _TILE):
        at = begin + tl.arange(0, _TILE)
        x = tl.load(maxima + at, mask=at < num_maxima, other=-float("inf"))
        is_listed = (x >= bound).to(tl.int32)
        place = num_chunks + tl.cumsum(is_listed, axis=0) - 1
        tl.store(chunks + place, at, mask=is_listed != 0)
        num_chunks += tl.sum(is_listed, axis=0)
    tl.debug_barrier()  # other threads read it
    # Reading a long list costs more than it saves.
    return tl.where(2 * num_chunks > num_maxima, num_maxima, num_chunks)


@triton.jit
def _read_tile(values, chunks, begin, num_chunks, length):
    """Return the indices and values of listed chunks from ``begin`` on, [TILE_CHUNKS * CHUNK].

    All chunks are listed if ``chunks`` is None or ``num_chunks`` is their number; then nothing
    waits for a list. Values past the end are -inf.
    """
    at = begin + tl.arange(0, TILE_CHUNKS)
    chunk = at
    if chunks is not None:
        is_partial = num_chunks * CHUNK < length
        listed = tl.load(chunks + at, mask=(at < num_chunks) & is_partial, other=length)
        chunk = tl.where(is_partial, listed, at)
    tokens = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(values + tokens, mask=tokens < length, other=-float("inf"))
    return tl.reshape(tokens, [_TILE]), tl.reshape(x, [_TILE])


@triton.jit
def mass_above(logits, chunks, num_chunks, cut, high, vocab):
    """Return the mass, in units of ``exp(high)``, of listed logits above a cut."""
    if num_chunks <= TILE_CHUNKS:
        _, x = _read_tile(  # pyright: ignore[reportGeneralTypeIssues]
            logits, chunks, 0, num_chunks, vocab
        )
        mass = _masses(x, cut, high)
    else:
        mass = tl.zeros([_TILE], tl.float32)
        for begin in range(0, num_chunks, 4 * TILE_CHUNKS):
            # Together, or each would wait for the one before.
            _, x_0 = _read_tile(logits, chunks, begin, num_chunks, vocab)
            _, x_1 = _read_tile(logits, chunks, begin + TILE_CHUNKS, num_chunks, vocab)
            _, x_2 = _read_tile(logits, chunks, begin + 2 * TILE_CHUNKS, num_chunks, vocab)
            _, x_3 = _read_tile(logits, chunks, begin + 3 * TILE_CHUNKS, num_chunks, vocab)
            mass += _masses(x_0, cut, high) + _masses(x_1, cut, high)
            mass += _masses(x_2, cut, high) + _masses(x_3, cut, high)
    return tl.sum(mass, axis=0)


@triton.jit
def _masses(x, cut, high):
    return tl.where(x > cut, tl.exp(x - high), 0.0)


@triton.jit
def _best_above(logits, chunks, num_chunks, cut, key_0, key_1, vocab):
    """Return the index of the best score of listed logits above a cut."""
    best = tl.full([_TILE], -float("inf"), tl.float32)
    best_at = tl.full([_TILE], vocab - 1, tl.int32)
    for begin in range(0, num_chunks, TILE_CHUNKS):
        tokens, x = _read_tile(  # pyright: ignore[reportGeneralTypeIssues]
            logits, chunks, begin, num_chunks, vocab
        )
        score = tl.where(x > cut, x + gumbel(tokens, key_0, key_1), -float("inf"))
        is_better = score > best
        best = tl.where(is_better, score, best)
        best_at = tl.where(is_better, tokens, best_at)
    top = tl.max(best, axis=0)
    return tl.min(tl.where(best == top, best_at, vocab - 1), axis=0)


@triton.jit
def find_threshold(
    values, chunks, num_chunks, wanted, most, low, high, length, BY_MASS: tl.constexpr
):
    """Return a value that the fewest of the largest values reach which make up the wanted count or
    mass; all equal to the last of them as well.

    It is ``low`` if all that reach it do not suffice.

    Args:
        values: of the row, logits or their chunks' maxima.
        chunks: the list of those to consider, or None for all.
        num_chunks: the length of the list.
        wanted: a number of values, or a mass in units of ``exp(high)``.
        most: up to this number may reach the result instead, for an early end.
        low, high: bounds of the result: the lowest value that may be kept, and the row's highest.
        length: of ``values``.
        BY_MASS: whether ``wanted`` is a mass; there is no early end then.

    Each pass divides the range into five by four pivots; in the first, one of them is ``low``, for
    what all together amount to. The search ends when they do not suffice, when a pivot separates
    the wanted number, or when the range contains a single value, however often it occurs, which
    happens because every float between two others eventually becomes a pivot. A range that cannot
    be divided ends it as well.
    """
    above = tl.full([], float("inf"), tl.float32)  # the result is in [low, above)
    is_found = low == high
    first = tl.zeros([], tl.float32)  # the lowest pivot is the bound itself in the first pass
    pivot_at = tl.arange(0, 2)[:, None] + 2 * tl.arange(0, 2)[None, :]  # as they are joined
    while is_found == 0:
        from_low, from_above = low, above
        # Clamped, because a range that overflows would have no pivot in it.
        step = tl.minimum((tl.minimum(above, high) - low) * 0.2, 4e37)
        pivot_0 = low + first * step
        pivot_1 = low + (first + 1.0) * step
        pivot_2 = low + (first + 2.0) * step
        pivot_3 = low + (first + 3.0) * step
        sum_0 = tl.zeros([_TILE], tl.float32)
        sum_1 = tl.zeros([_TILE], tl.float32)
        sum_2 = tl.zeros([_TILE], tl.float32)
        sum_3 = tl.zeros([_TILE], tl.float32)
        least = tl.full([_TILE], float("inf"), tl.float32)
        largest = tl.full([_TILE], -float("inf"), tl.float32)
        for begin in range(0, num_chunks, TILE_CHUNKS):
            _, x = _read_tile(values, chunks, begin, num_chunks, length)
            # Counts are integers below 2^24, which are exact in float32.
            weight = tl.exp(x - high) if BY_MASS else 1.0
            sum_0 += tl.where(x >= pivot_0, weight, 0.0)
            sum_1 += tl.where(x >= pivot_1, weight, 0.0)
            sum_2 += tl.where(x >= pivot_2, weight, 0.0)
            sum_3 += tl.where(x >= pivot_3, weight, 0.0)
            least = tl.minimum(least, tl.where(x >= low, x, float("inf")))
            largest = tl.maximum(largest, tl.where(x < above, x, -float("inf")))
        # One reduction for all: its barriers and shuffles are what a pass waits for.
        sums = tl.sum(tl.join(tl.join(sum_0, sum_1), tl.join(sum_2, sum_3)), axis=0)
        least_of_all, largest_of_all = two_maxima(-least, largest)  # pyright: ignore[reportGeneralTypeIssues]
        is_found = -least_of_all == largest_of_all
        # Move up to the last pivot with enough at or above it, down to the first with less.
        pivots = tl.where(pivot_at == 0, pivot_0, pivot_1)
        pivots = tl.where(pivot_at >= 2, tl.where(pivot_at == 2, pivot_2, pivot_3), pivots)
        is_enough = sums >= wanted
        low = tl.maximum(low, _max(tl.where(is_enough, pivots, -float("inf"))))
        above = tl.minimum(above, -_max(tl.where(is_enough, -float("inf"), -pivots)))
        if not BY_MASS:
            is_found = is_found | (_max((is_enough & (sums <= most)).to(tl.int32)) != 0)
        is_found = is_found | ((low == from_low) & (above == from_above)) | (above <= low)
        first = tl.full([], 1.0, tl.float32)
    return low


@triton.jit
def two_maxima(a, b):
    """Return the maxima of two tensors, by one reduction."""
    both = tl.max(tl.join(a, b), axis=0)
    is_first = tl.arange(0, 2) == 0
    of_a = tl.max(tl.where(is_first, both, -float("inf")), axis=0)
    return of_a, tl.max(tl.where(is_first, -float("inf"), both), axis=0)


@triton.jit
def next_below(x):
    """Return the largest float32 below a finite number: what is above it is at least x."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x > 0.0, bits - 1, bits + 1)  # sign and magnitude
    return tl.where(x == 0.0, -1.401298464324817e-45, bits.to(tl.float32, bitcast=True))


@triton.jit
def _max(x):
    return tl.max(tl.max(x, axis=1), axis=0)

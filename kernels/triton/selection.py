"""The positions with the highest of a token's scores; for the contract see ``select_slots`` of
``kernels.reference.sparse``.

    many tokens   a program for each: the least score that is selected, four bits of it at a time,
                  then the slots of what is not below it
    few tokens    a program for a run of a token's positions:
                  count digits of 11 bits ─► of those with the leading digit ─► and the last one
                  ─► count what each run selects ─► write its slots behind those of the runs before

Both select the same: numbers are compared as integers, and the first of equals are taken. Few
tokens by a program each would leave most multiprocessors idle, while one reads all scores of a long
text nine times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention import DeviceGeometry
from kernels.triton.launch import launch, power_of_2, wait_for_prior_kernels

_TILE = 1024
RUN = 4096  # positions of a program, of few tokens
_TURNS, _DIGIT = 3, 11  # of 32 bits, the last turn has the 10 that remain
# So many tokens keep the GPU busy with a program each.
MANY_TOKENS = 256


def select_highest(
    scores: torch.Tensor, tokens: DeviceGeometry, slots: torch.Tensor, block_size: int
) -> None:
    """Write the slots of each token's highest scores, in the order of positions.

    Args:
        scores: [tokens, longest] float32, of which a token has its length's; those of a token with
            no more than ``top_k`` positions are not read.
        tokens: their lengths, and the lines of the tables of blocks.
        slots: [tokens, top_k] int32, out.
        block_size: of the tables' blocks.
    """
    (count, longest), top_k = scores.shape, slots.shape[1]
    where = tokens.seq_lens, tokens.slots, tokens.tables, tokens.tables.stride(0), longest
    if count >= MANY_TOKENS or longest <= RUN:
        shape = {"TOP_K": top_k, "BLOCK_SIZE": block_size, "TILE": _TILE, "num_warps": 8}
        launch(_select_kernel, (count,), slots, scores, *where, **shape)
        return
    num_runs = -(-longest // RUN)
    grid, device = (count, num_runs), scores.device
    digits = torch.zeros((count, _TURNS, 1 << _DIGIT), dtype=torch.int32, device=device)
    tallies = torch.empty((count, num_runs, 2), dtype=torch.int32, device=device)
    shape = {"TOP_K": top_k, "RUN": RUN, "TURNS": _TURNS, "DIGIT": _DIGIT, "num_warps": 8}
    read = scores, tokens.seq_lens, longest
    for turn in range(_TURNS):
        launch(_count_digits_kernel, grid, digits, *read, TURN=turn, **shape)
    launch(_count_selected_kernel, grid, tallies, digits, *read, **shape)
    runs = power_of_2(num_runs)
    given = slots, tallies, digits, scores, *where
    launch(_write_selected_kernel, grid, *given, BLOCK_SIZE=block_size, **shape, RUNS=runs)


# Arguments that change from step to step are not specialised on: see plan.py.
@triton.jit(
    do_not_specialize=["table_stride", "longest"],
    do_not_specialize_on_alignment=["slots", "seq_lens", "lines", "tables"],
)
def _select_kernel(
    slots,  # [tokens, TOP_K]
    scores,  # [tokens, longest]
    seq_lens,
    lines,  # of the tables
    tables,
    table_stride,
    longest,
    TOP_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One token."""
    wait_for_prior_kernels()
    token = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + token)
    table = tables + tl.load(lines + token).to(tl.int64) * table_stride
    own, out = scores + token * longest, slots + token * TOP_K
    if length <= TOP_K:
        _write_all(out, table, 0, length, BLOCK_SIZE, TILE)
    else:
        least, needed = _least_selected(own, length, TOP_K, TILE)  # pyright: ignore[reportGeneralTypeIssues]
        none = tl.zeros([], tl.int32)
        _write_highest(out, own, table, 0, length, least, needed, none, none, BLOCK_SIZE, TILE)


@triton.jit
def _least_selected(own, length, TOP_K: tl.constexpr, TILE: tl.constexpr):
    """Return the TOP_K-th highest number of a row, and how many of those equal to it to take."""
    digits, places = tl.arange(0, 16).to(tl.uint32), tl.arange(0, TILE)
    least = tl.zeros([], tl.uint32)
    needed = tl.full([], TOP_K, tl.int32)
    for turn in tl.static_range(8):
        counts = tl.zeros([16], tl.int32)
        for begin in range(0, length, TILE):
            positions = begin + places
            is_used = positions < length
            number = _ordered(tl.load(own + positions, mask=is_used, other=0.0))
            leading = number >> (28 - 4 * turn)
            is_in = is_used & ((leading >> 4) == least)
            is_digit = is_in[:, None] & ((leading & 15)[:, None] == digits[None, :])
            counts += tl.sum(is_digit.to(tl.int32), axis=0)
        is_higher = digits[None, :] > digits[:, None]
        higher = tl.sum(tl.where(is_higher, counts[None, :], 0), axis=1)
        # The digit with which the last one selected goes on.
        is_next = (higher < needed) & (higher + counts >= needed)
        least = (least << 4) | tl.sum(tl.where(is_next, digits, 0), axis=0).to(tl.uint32)
        needed -= tl.sum(tl.where(is_next, higher, 0), axis=0)
    return least, needed


@triton.jit(do_not_specialize=["longest"], do_not_specialize_on_alignment=["seq_lens"])
def _count_digits_kernel(
    digits,  # [tokens, TURNS, 1 << DIGIT] in: counts of earlier turns; out: of this one
    scores,
    seq_lens,
    longest,
    TURN: tl.constexpr,
    TOP_K: tl.constexpr,
    RUN: tl.constexpr,
    TURNS: tl.constexpr,
    DIGIT: tl.constexpr,
):
    """A run of one token: how often each digit follows the leading ones of the least selected."""
    wait_for_prior_kernels()
    token = tl.program_id(0).to(tl.int64)
    length, begin = tl.load(seq_lens + token), tl.program_id(1) * RUN
    if (length <= TOP_K) | (begin >= length):
        return
    BINS: tl.constexpr = 1 << DIGIT
    digits += token * TURNS * BINS
    least, _ = _leading_digits(digits, TURN, TOP_K, DIGIT)  # pyright: ignore[reportGeneralTypeIssues]
    BEHIND: tl.constexpr = 32 - TURN * DIGIT  # bits from this turn's on
    WIDTH: tl.constexpr = DIGIT if DIGIT <= BEHIND else BEHIND
    positions = begin + tl.arange(0, RUN)
    is_in = positions < length
    number = _ordered(tl.load(scores + token * longest + positions, mask=is_in, other=0.0))
    behind = number
    if TURN > 0:
        is_in = is_in & ((number >> BEHIND) == least)
        behind -= least << BEHIND
    digit = behind >> (BEHIND - WIDTH)
    counts = tl.histogram(digit.to(tl.int32), BINS, mask=is_in)
    place = digits + TURN * BINS + tl.arange(0, BINS)
    tl.atomic_add(place, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _leading_digits(digits, TURNS: tl.constexpr, TOP_K: tl.constexpr, DIGIT: tl.constexpr):
    """Return the first digits of the TOP_K-th highest number, as one number, and how many of those
    that begin with them are selected."""
    bins = tl.arange(0, 1 << DIGIT)  # pyright: ignore[reportOperatorIssue]
    least = tl.zeros([], tl.uint32)
    needed = tl.full([], TOP_K, tl.int32)
    for turn in tl.static_range(TURNS):
        counts = tl.load(digits + turn * (1 << DIGIT) + bins)
        higher = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)
        is_next = (higher < needed) & (higher + counts >= needed)
        digit = tl.sum(tl.where(is_next, bins, 0), axis=0).to(tl.uint32)
        # The last one has the bits that remain.
        least = (least << (DIGIT if 32 - turn * DIGIT >= DIGIT else 32 - turn * DIGIT)) | digit
        needed -= tl.sum(tl.where(is_next, higher, 0), axis=0)
    return least, needed


@triton.jit(do_not_specialize=["longest"], do_not_specialize_on_alignment=["seq_lens"])
def _count_selected_kernel(
    tallies,  # [tokens, runs, 2] out: numbers above the least selected, and equal to it
    digits,
    scores,
    seq_lens,
    longest,
    TOP_K: tl.constexpr,
    RUN: tl.constexpr,
    TURNS: tl.constexpr,
    DIGIT: tl.constexpr,
):
    """A run of one token."""
    wait_for_prior_kernels()
    token = tl.program_id(0).to(tl.int64)
    length, begin = tl.load(seq_lens + token), tl.program_id(1) * RUN
    if (length <= TOP_K) | (begin >= length):
        return
    digits += token * TURNS * (1 << DIGIT)
    least, _ = _leading_digits(digits, TURNS, TOP_K, DIGIT)  # pyright: ignore[reportGeneralTypeIssues]
    positions = begin + tl.arange(0, RUN)
    is_used = positions < length
    number = _ordered(tl.load(scores + token * longest + positions, mask=is_used, other=0.0))
    place = tallies + (token * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(place, tl.sum((is_used & (number > least)).to(tl.int32), axis=0))
    tl.store(place + 1, tl.sum((is_used & (number == least)).to(tl.int32), axis=0))


@triton.jit(
    do_not_specialize=["table_stride", "longest"],
    do_not_specialize_on_alignment=["slots", "seq_lens", "lines", "tables"],
)
def _write_selected_kernel(
    slots,
    tallies,
    digits,
    scores,
    seq_lens,
    lines,  # of the tables
    tables,
    table_stride,
    longest,
    TOP_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RUN: tl.constexpr,
    TURNS: tl.constexpr,
    DIGIT: tl.constexpr,
    RUNS: tl.constexpr,  # no fewer than there are, a power of 2
):
    """A run of one token."""
    wait_for_prior_kernels()
    token, run = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length, begin = tl.load(seq_lens + token), run * RUN
    if begin >= length:
        return
    end = tl.minimum(begin + RUN, length)
    table = tables + tl.load(lines + token).to(tl.int64) * table_stride
    out = slots + token * TOP_K
    if length <= TOP_K:
        _write_all(out, table, begin, end, BLOCK_SIZE, RUN)
    else:
        digits += token * TURNS * (1 << DIGIT)
        least, needed = _leading_digits(digits, TURNS, TOP_K, DIGIT)  # pyright: ignore[reportGeneralTypeIssues]
        before = tl.arange(0, RUNS)
        place = tallies + (token * tl.num_programs(1) + before) * 2
        above = tl.sum(tl.load(place, mask=before < run, other=0), axis=0)
        equals = tl.sum(tl.load(place + 1, mask=before < run, other=0), axis=0)
        taken = above + tl.minimum(equals, needed)
        own = scores + token * longest
        _write_highest(out, own, table, begin, end, least, needed, taken, equals, BLOCK_SIZE, RUN)


@triton.jit
def _write_all(out, table, begin, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Write the slots of positions [begin, end)."""
    for first in range(begin, end, TILE):
        positions = first + tl.arange(0, TILE)
        is_used = positions < end
        found = _slots_of(table, positions, is_used, BLOCK_SIZE)
        tl.store(out + positions, found, mask=is_used)


@triton.jit
def _write_highest(
    out,
    own,
    table,
    begin,
    end,
    least,
    needed,
    taken,
    equals,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the slots of what is selected of positions [begin, end).

    ``taken`` of those before have been selected, and ``equals`` of them are equal to the ``least``
    number selected, of which ``needed`` are.
    """
    for first in range(begin, end, TILE):
        positions = first + tl.arange(0, TILE)
        is_used = positions < end
        number = _ordered(tl.load(own + positions, mask=is_used, other=0.0))
        is_equal = (is_used & (number == least)).to(tl.int32)
        rank = equals + tl.cumsum(is_equal, axis=0) - is_equal
        is_kept = is_used & ((number > least) | ((is_equal > 0) & (rank < needed)))
        kept = is_kept.to(tl.int32)
        place = taken + tl.cumsum(kept, axis=0) - kept
        found = _slots_of(table, positions, is_used, BLOCK_SIZE)
        tl.store(out + place, found, mask=is_kept)
        taken += tl.sum(kept, axis=0)
        equals += tl.sum(is_equal, axis=0)


@triton.jit
def _ordered(x):
    """Return unsigned integers in the order of numbers; both zeros are one, and what is no number
    is the lowest."""
    x = tl.where(x == 0.0, 0.0, tl.where(x == x, x, -float("inf")))
    bits = x.to(tl.uint32, bitcast=True)
    return bits ^ tl.where((bits >> 31) != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def _slots_of(table, positions, is_used, BLOCK_SIZE: tl.constexpr):
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=is_used, other=0)
    return blocks * BLOCK_SIZE + positions % BLOCK_SIZE

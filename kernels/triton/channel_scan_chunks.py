"""Mamba-1's selective state spaces over prompts (Gu & Dao 2023), their chunks side by side.

Each state of a channel is a sequence of its own, s <- a_t s + b_t, with its own decays: that is no
product for matrix units. But what a chunk of tokens makes of a state is known before the state: it
decays by the product of all a_t, and what the chunk makes of zero is added::

    chunk     0          1          2          3, the row's last
    sum       0 -> s     0 -> s     0 -> s                           all at once
    begin     S_0     -> S_1     -> S_2     -> S_3                   a step for a chunk
    walk      S_0 -> y   S_1 -> y   S_2 -> y   S_3 -> y, state       all at once

So each token is computed twice, but by as many programs as there are chunks, where the walk of
``recurrent.py`` waits for each token's memory in turn.

Which tokens are in a chunk depends on where a row's step begins, so the last bits of a result
depend on how its prompt was split.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.inputs import StepRows
from kernels.recurrent import CHUNK, MIN_CHUNKED_TOKENS, max_chunks
from kernels.triton.chunks import chunks_before, row_of_chunk
from kernels.triton.launch import launch, power_of_2, wait_for_prior_kernels
from kernels.triton.recurrent import begins_with_state, softplus
from kernels.triton.recurrent import channel_scan as walk

_STRIP = 32  # channels of a program, with all their states, in the registers of one warp
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


def channel_scan(
    x: torch.Tensor,
    time_steps: torch.Tensor,
    write: torch.Tensor,
    read: torch.Tensor,
    rates: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    rows: StepRows,
) -> torch.Tensor:
    """See ``kernels.reference.recurrent.channel_scan``; x is contiguous."""
    given, last = (x, time_steps, write), MIN_CHUNKED_TOKENS - 1
    y = walk(*given, read, rates, skip, state, rows, most=last)
    (size, channels), num_rows = rates.shape, rows.slots.shape[0]
    num_chunks = max_chunks(x.shape[0], num_rows, rows.longest)
    if not num_chunks:
        return y
    # A chunk's sums from zero, and then the states that it begins with.
    states = torch.empty((num_chunks, size, channels), dtype=torch.float32, device=x.device)
    steps = torch.empty((num_chunks, channels), dtype=torch.float32, device=x.device)
    strips = -(-channels // _STRIP)
    meta = {
        "CHANNELS": channels,
        "SIZE": size,
        "WIDE": power_of_2(size),
        "CHUNK": CHUNK,
        "LEAST": MIN_CHUNKED_TOKENS,
        "STRIP": _STRIP,
        "num_warps": 1,
    }
    strides = time_steps.stride(0), write.stride(0)
    launch(
        _sum_channels_kernel,
        (strips, num_chunks),
        states,
        steps,
        *given,
        rates,
        rows.query_start,
        *strides,
        num_rows,
        **meta,
    )
    launch(
        _begin_channels_kernel,
        (strips, num_rows),
        states,
        steps,
        rates,
        state,
        rows.slots,
        rows.query_start,
        rows.starts,
        **meta,
    )
    launch(
        _walk_channels_kernel,
        (strips, num_chunks),
        y,
        states,
        *given,
        read,
        rates,
        skip,
        state,
        rows.slots,
        rows.query_start,
        rows.starts,
        *strides,
        read.stride(0),
        num_rows,
        **meta,
    )
    return y


@triton.jit(
    do_not_specialize=["steps_stride", "write_stride", "num_rows"],
    do_not_specialize_on_alignment=["query_start", "write"],
)
def _sum_channels_kernel(
    states,  # [chunks, SIZE, CHANNELS] out
    steps,  # [chunks, CHANNELS] out: sums of time steps
    x,
    time_steps,
    write,
    rates,
    query_start,
    steps_stride,
    write_stride,
    num_rows,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,
    STRIP: tl.constexpr,
):
    """What one chunk, of those before a row's last, makes of states of zero."""
    wait_for_prior_kernels()
    chunk = tl.program_id(1)
    row, index = row_of_chunk(  # pyright: ignore[reportGeneralTypeIssues]
        chunk, query_start, num_rows, CHUNK, LEAST
    )
    # The grid has an upper bound of the rows.
    if row >= num_rows:
        return
    begin = tl.load(query_start + row) + index * CHUNK
    if tl.load(query_start + row + 1) <= begin + CHUNK:
        return
    columns = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    lines = tl.arange(0, WIDE)
    is_line, is_column = lines < SIZE, columns < CHANNELS
    is_used = is_line[:, None] & is_column[None, :]
    within = lines[:, None] * CHANNELS + columns[None, :]
    rate = tl.load(rates + within, mask=is_used, other=0.0) * _LOG2_E
    s = tl.zeros([WIDE, STRIP], tl.float32)
    total = tl.zeros([STRIP], tl.float32)
    token = begin.to(tl.int64)
    for _ in range(CHUNK):
        own = tl.load(x + token * CHANNELS + columns, mask=is_column, other=0.0).to(tl.float32)
        raw = tl.load(time_steps + token * steps_stride + columns, mask=is_column, other=0.0)
        into = tl.load(write + token * write_stride + lines, mask=is_line, other=0.0)
        dt = softplus(raw.to(tl.float32))
        s = s * tl.exp2(rate * dt[None, :]) + into.to(tl.float32)[:, None] * (dt * own)[None, :]
        total += dt
        token += 1
    tl.store(states + chunk.to(tl.int64) * SIZE * CHANNELS + within, s, mask=is_used)
    tl.store(steps + chunk.to(tl.int64) * CHANNELS + columns, total, mask=is_column)


@triton.jit(do_not_specialize_on_alignment=["slots", "query_start", "starts"])
def _begin_channels_kernel(
    states,  # in: what each chunk makes of zero; out: what it begins with
    steps,
    rates,
    state,
    slots,
    query_start,
    starts,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,
    STRIP: tl.constexpr,
):
    """The states that one row's chunks begin with."""
    wait_for_prior_kernels()
    row = tl.program_id(1)
    length = tl.load(query_start + row + 1) - tl.load(query_start + row)
    if length < LEAST:
        return
    columns = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    lines = tl.arange(0, WIDE)
    is_column = columns < CHANNELS
    is_used = (lines < SIZE)[:, None] & is_column[None, :]
    within = lines[:, None] * CHANNELS + columns[None, :]
    place = state + tl.load(slots + row).to(tl.int64) * SIZE * CHANNELS + within
    is_begun = begins_with_state(tl.load(starts + row))
    s = tl.load(place, mask=is_used & is_begun, other=0.0)
    rate = tl.load(rates + within, mask=is_used, other=0.0) * _LOG2_E
    first = chunks_before(row, query_start, CHUNK, LEAST).to(tl.int64)
    states += first * SIZE * CHANNELS
    steps += first * CHANNELS
    # Memory is read a few chunks ahead, or each of them would wait for it.
    for _ in tl.range(0, (length - 1) // CHUNK, num_stages=4):
        made = tl.load(states + within, mask=is_used, other=0.0)
        total = tl.load(steps + columns, mask=is_column, other=0.0)
        tl.store(states + within, s, mask=is_used)
        s = s * tl.exp2(rate * total[None, :]) + made
        states += SIZE * CHANNELS
        steps += CHANNELS
    tl.store(states + within, s, mask=is_used)


@triton.jit(
    do_not_specialize=["steps_stride", "write_stride", "read_stride", "num_rows"],
    do_not_specialize_on_alignment=["slots", "query_start", "starts", "write", "read"],
)
def _walk_channels_kernel(
    y,
    states,
    x,
    time_steps,
    write,
    read,
    rates,
    skip,
    state,
    slots,
    query_start,
    starts,
    steps_stride,
    write_stride,
    read_stride,
    num_rows,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Process a strip of channels, with all their states, through one chunk."""
    wait_for_prior_kernels()
    chunk = tl.program_id(1)
    row, index = row_of_chunk(  # pyright: ignore[reportGeneralTypeIssues]
        chunk, query_start, num_rows, CHUNK, LEAST
    )
    if row >= num_rows:
        return
    begin, end = tl.load(query_start + row) + index * CHUNK, tl.load(query_start + row + 1)
    columns = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    lines = tl.arange(0, WIDE)
    is_line, is_column = lines < SIZE, columns < CHANNELS
    is_used = is_line[:, None] & is_column[None, :]
    within = lines[:, None] * CHANNELS + columns[None, :]
    place = states + chunk.to(tl.int64) * SIZE * CHANNELS + within
    s = tl.load(place, mask=is_used, other=0.0)
    rate = tl.load(rates + within, mask=is_used, other=0.0) * _LOG2_E
    through = tl.load(skip + columns, mask=is_column, other=0.0)
    token = begin.to(tl.int64)
    for _ in range(begin, tl.minimum(begin + CHUNK, end)):
        at = token * CHANNELS + columns
        own = tl.load(x + at, mask=is_column, other=0.0).to(tl.float32)
        raw = tl.load(time_steps + token * steps_stride + columns, mask=is_column, other=0.0)
        into = tl.load(write + token * write_stride + lines, mask=is_line, other=0.0)
        out_of = tl.load(read + token * read_stride + lines, mask=is_line, other=0.0)
        dt = softplus(raw.to(tl.float32))
        s = s * tl.exp2(rate * dt[None, :]) + into.to(tl.float32)[:, None] * (dt * own)[None, :]
        result = tl.sum(s * out_of.to(tl.float32)[:, None], axis=0) + through * own
        tl.store(y + at, result.to(y.dtype.element_ty), mask=is_column)
        token += 1
    is_kept = (end <= begin + CHUNK) & (tl.load(starts + row) >= 0)
    place = state + tl.load(slots + row).to(tl.int64) * SIZE * CHANNELS + within
    tl.store(place, s, mask=is_used & is_kept)

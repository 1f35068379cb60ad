"""Recurrent layers; for the contract see ``kernels.reference.recurrent``.

A program iterates over one row's tokens with a strip of a head's state in registers: decoding reads
and writes each state once. A token's result has the same bits however its text was cut into steps.
For prompts, chunks are faster, without that guarantee (``delta_chunks.py``, ``scan_chunks.py`` and
theirs of channels).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.inputs import StepRows
from kernels.recurrent import GatedDeltaShape, ScanShape
from kernels.triton.launch import launch, power_of_2, wait_for_prior_kernels
from kernels.triton.tiles import clamp, sigmoid

# Columns of a state per program, in the registers of one warp, whose sums need no other. Adjacent
# programs have adjacent strips: together they read whole lines of memory at the same time.
_STRIP = 16
_PADS: tl.constexpr = tl.constexpr(-1)  # the start of a row that is padding
_CHANNEL_STRIP = 32  # of channels with a few states each


def gated_delta(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    log_a: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    rows: StepRows,
    shape: GatedDeltaShape,
    *,
    most: int | None = None,
) -> torch.Tensor:
    """See ``kernels.reference.recurrent.gated_delta``; mixed is contiguous.

    Rows of more than ``most`` tokens are skipped: their states are unchanged, their results
    undefined. The results of padding are zeros.
    """
    heads, value_dim = shape.value_heads, shape.value_dim
    y = torch.empty((mixed.shape[0], heads, value_dim), dtype=mixed.dtype, device=mixed.device)
    launch(
        _gated_delta_kernel,
        (-(-value_dim // _STRIP), heads, rows.slots.shape[0]),
        y,
        mixed,
        gates,
        log_a,
        dt_bias,
        state,
        rows.slots,
        rows.query_start,
        rows.starts,
        gates.stride(0),
        KEY_HEADS=shape.key_heads,
        HEADS=heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=value_dim,
        MOST_BETA=2.0 if shape.allows_negative else 1.0,
        BY_CHANNEL=shape.decays_channels,
        LEAST=shape.least_log_decay,
        WIDE=power_of_2(shape.key_dim),
        STRIP=_STRIP,
        MOST=most or 0,
        num_warps=1,
    )
    return y


def selective_scan(
    mixed: torch.Tensor,
    time_steps: torch.Tensor,
    log_a: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    rows: StepRows,
    shape: ScanShape,
    *,
    most: int | None = None,
) -> torch.Tensor:
    """See ``kernels.reference.recurrent.selective_scan``; mixed is contiguous.

    ``most``: as in ``gated_delta``.
    """
    heads, head_dim = shape.heads, shape.head_dim
    y = torch.empty((mixed.shape[0], heads, head_dim), dtype=mixed.dtype, device=mixed.device)
    launch(
        _selective_scan_kernel,
        (-(-head_dim // _STRIP), heads, rows.slots.shape[0]),
        y,
        mixed,
        time_steps,
        log_a,
        dt_bias,
        skip,
        state,
        rows.slots,
        rows.query_start,
        rows.starts,
        time_steps.stride(0),
        *(float(limit) for limit in shape.time_step_limit),
        HEADS=heads,
        GROUPS=shape.groups,
        HEAD_DIM=head_dim,
        SIZE=shape.state_size,
        WIDE=power_of_2(shape.state_size),
        STRIP=_STRIP,
        MOST=most or 0,
        num_warps=1,
    )
    return y


def channel_scan(
    x: torch.Tensor,
    time_steps: torch.Tensor,
    write: torch.Tensor,
    read: torch.Tensor,
    rates: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    rows: StepRows,
    *,
    most: int | None = None,
) -> torch.Tensor:
    """See ``kernels.reference.recurrent.channel_scan``; x is contiguous.

    ``most``: as in ``gated_delta``.
    """
    size, channels = rates.shape
    y = torch.empty_like(x)
    launch(
        _channel_scan_kernel,
        (-(-channels // _CHANNEL_STRIP), rows.slots.shape[0]),
        y,
        x,
        time_steps,
        write,
        read,
        rates,
        skip,
        state,
        rows.slots,
        rows.query_start,
        rows.starts,
        time_steps.stride(0),
        write.stride(0),
        read.stride(0),
        CHANNELS=channels,
        SIZE=size,
        WIDE=power_of_2(size),
        STRIP=_CHANNEL_STRIP,
        MOST=most or 0,
        num_warps=1,
    )
    return y


@triton.jit
def _store_zeros(places, mask):
    """Store the results of padding: they must be finite, and nobody waits for a state."""
    tl.store(places, tl.zeros(places.shape, places.dtype.element_ty), mask=mask)


@triton.jit
def begins_with_state(start):
    """Return whether a row with this start begins with the stored state, or with zeros."""
    return (start > 0) | (start < -1)


@triton.jit
def softplus(x):
    """``log(1 + e^x)``, by its series where e^x is so small that adding 1 would round it away."""
    u = tl.exp(tl.minimum(x, 20.0, propagate_nan=tl.PropagateNan.ALL))
    series = u * (1.0 - u * (0.5 - u * (1.0 / 3.0 - u * 0.25)))
    small = tl.where(u < 0.03, series, tl.log(1.0 + u))
    return tl.where(x > 20.0, x, small)


@triton.jit
def log_decay(rate, raw, LEAST: tl.constexpr):
    """The logarithm of a decay; ``rate`` is negative."""
    if LEAST == 0.0:
        return rate * softplus(raw)
    return LEAST * sigmoid(-rate * raw)


@triton.jit(
    do_not_specialize=["gates_stride"],
    do_not_specialize_on_alignment=["slots", "query_start", "starts", "gates"],
)
def _gated_delta_kernel(
    y,
    mixed,
    gates,
    log_a,
    dt_bias,
    state,
    slots,
    query_start,
    starts,
    gates_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MOST_BETA: tl.constexpr,
    BY_CHANNEL: tl.constexpr,  # a decay for each line of a state
    LEAST: tl.constexpr,  # of the decays' logarithms; 0: they have no bound
    WIDE: tl.constexpr,
    STRIP: tl.constexpr,
    MOST: tl.constexpr,  # tokens of a row; 0: any number
):
    """Process a strip of columns of one head's state through one row's tokens."""
    wait_for_prior_kernels()
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    row = tl.program_id(2)
    head = tl.program_id(1)
    begin, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    if MOST > 0 and end - begin > MOST:
        return
    columns = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    keys = tl.arange(0, WIDE)
    is_key, is_column = keys < KEY_DIM, columns < VALUE_DIM
    is_used = is_key[:, None] & is_column[None, :]
    start = tl.load(starts + row)
    if start == _PADS:
        for token in range(begin.to(tl.int64), end.to(tl.int64)):
            at = (token * HEADS + head) * VALUE_DIM + columns
            _store_zeros(y + at, is_column)
        return
    line = tl.load(slots + row).to(tl.int64) * HEADS + head
    places = state + line * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + columns[None, :]
    s = tl.load(places, mask=is_used & begins_with_state(start), other=0.0)
    rate = -tl.exp(tl.load(log_a + head))
    if BY_CHANNEL:
        bias = tl.load(dt_bias + head * KEY_DIM + keys, mask=is_key, other=0.0)
    else:
        bias = tl.load(dt_bias + head)
    key_head = head // (HEADS // KEY_HEADS)
    token = begin.to(tl.int64)
    for _ in range(begin, end):
        query_place = mixed + token * CHANNELS + key_head * KEY_DIM + keys
        query = tl.load(query_place, mask=is_key, other=0.0).to(tl.float32)
        key = tl.load(query_place + KEY_HEADS * KEY_DIM, mask=is_key, other=0.0).to(tl.float32)
        query *= tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6) * (1.0 / KEY_DIM**0.5)
        key *= tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6)
        at = head * VALUE_DIM + columns
        value_place = mixed + token * CHANNELS + 2 * KEY_HEADS * KEY_DIM + at
        value = tl.load(value_place, mask=is_column, other=0.0).to(tl.float32)
        gate = gates + token * gates_stride + head
        beta = MOST_BETA * sigmoid(tl.load(gate).to(tl.float32))
        if BY_CHANNEL:
            place = gates + token * gates_stride + HEADS + head * KEY_DIM + keys
            alpha = tl.load(place, mask=is_key, other=0.0).to(tl.float32)
            s *= tl.exp(log_decay(rate, alpha + bias, LEAST))[:, None]
        else:
            alpha = tl.load(gate + HEADS).to(tl.float32)
            s *= tl.exp(log_decay(rate, alpha + bias, LEAST))
        correction = beta * (value - tl.sum(s * key[:, None], axis=0))
        s += key[:, None] * correction[None, :]
        result = tl.sum(s * query[:, None], axis=0).to(y.dtype.element_ty)
        tl.store(y + token * HEADS * VALUE_DIM + at, result, mask=is_column)
        token += 1
    tl.store(places, s, mask=is_used & (start >= 0))


@triton.jit(
    do_not_specialize=["steps_stride", "least", "most"],
    do_not_specialize_on_alignment=["slots", "query_start", "starts", "time_steps"],
)
def _selective_scan_kernel(
    y,
    mixed,
    time_steps,
    log_a,
    dt_bias,
    skip,
    state,
    slots,
    query_start,
    starts,
    steps_stride,
    least,
    most,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    STRIP: tl.constexpr,
    MOST: tl.constexpr,  # tokens of a row; 0: any number
):
    """Process a strip of columns of one head's state through one row's tokens."""
    wait_for_prior_kernels()
    CHANNELS: tl.constexpr = HEADS * HEAD_DIM + 2 * GROUPS * SIZE
    row = tl.program_id(2)
    head = tl.program_id(1)
    begin, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    if MOST > 0 and end - begin > MOST:
        return
    columns = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    lines = tl.arange(0, WIDE)
    is_line, is_column = lines < SIZE, columns < HEAD_DIM
    is_used = is_line[:, None] & is_column[None, :]
    start = tl.load(starts + row)
    if start == _PADS:
        for token in range(begin.to(tl.int64), end.to(tl.int64)):
            at = (token * HEADS + head) * HEAD_DIM + columns
            _store_zeros(y + at, is_column)
        return
    first = (tl.load(slots + row).to(tl.int64) * HEADS + head) * SIZE * HEAD_DIM
    places = state + first + lines[:, None] * HEAD_DIM + columns[None, :]
    s = tl.load(places, mask=is_used & begins_with_state(start), other=0.0)
    rate = -tl.exp(tl.load(log_a + head))
    bias, through = tl.load(dt_bias + head), tl.load(skip + head)
    group = head // (HEADS // GROUPS)
    at = head * HEAD_DIM + columns
    token = begin.to(tl.int64)
    for _ in range(begin, end):
        here = mixed + token * CHANNELS
        x = tl.load(here + at, mask=is_column, other=0.0).to(tl.float32)
        shared = here + HEADS * HEAD_DIM + group * SIZE + lines
        write = tl.load(shared, mask=is_line, other=0.0).to(tl.float32)
        read = tl.load(shared + GROUPS * SIZE, mask=is_line, other=0.0).to(tl.float32)
        raw = tl.load(time_steps + token * steps_stride + head).to(tl.float32)
        dt = clamp(softplus(raw + bias), least, most)
        s = s * tl.exp(rate * dt) + write[:, None] * (dt * x)[None, :]
        result = tl.sum(s * read[:, None], axis=0) + through * x
        place = y + token * HEADS * HEAD_DIM + at
        tl.store(place, result.to(y.dtype.element_ty), mask=is_column)
        token += 1
    tl.store(places, s, mask=is_used & (start >= 0))


@triton.jit(
    do_not_specialize=["steps_stride", "write_stride", "read_stride"],
    do_not_specialize_on_alignment=["slots", "query_start", "starts", "write", "read"],
)
def _channel_scan_kernel(
    y,
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
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    STRIP: tl.constexpr,
    MOST: tl.constexpr,  # tokens of a row; 0: any number
):
    """Process a strip of channels, with all their states, through one row's tokens."""
    wait_for_prior_kernels()
    row = tl.program_id(1)
    begin, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    if MOST > 0 and end - begin > MOST:
        return
    columns = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    lines = tl.arange(0, WIDE)
    is_line, is_column = lines < SIZE, columns < CHANNELS
    is_used = is_line[:, None] & is_column[None, :]
    start = tl.load(starts + row)
    if start == _PADS:
        for token in range(begin.to(tl.int64), end.to(tl.int64)):
            _store_zeros(y + token * CHANNELS + columns, is_column)
        return
    within = lines[:, None] * CHANNELS + columns[None, :]
    places = state + tl.load(slots + row).to(tl.int64) * SIZE * CHANNELS + within
    s = tl.load(places, mask=is_used & begins_with_state(start), other=0.0)
    rate = tl.load(rates + within, mask=is_used, other=0.0)
    through = tl.load(skip + columns, mask=is_column, other=0.0)
    token = begin.to(tl.int64)
    for _ in range(begin, end):
        at = token * CHANNELS + columns
        own = tl.load(x + at, mask=is_column, other=0.0).to(tl.float32)
        raw = tl.load(time_steps + token * steps_stride + columns, mask=is_column, other=0.0)
        dt = softplus(raw.to(tl.float32))
        into = tl.load(write + token * write_stride + lines, mask=is_line, other=0.0)
        out_of = tl.load(read + token * read_stride + lines, mask=is_line, other=0.0)
        s = s * tl.exp(rate * dt[None, :]) + into.to(tl.float32)[:, None] * (dt * own)[None, :]
        result = tl.sum(s * out_of.to(tl.float32)[:, None], axis=0) + through * own
        tl.store(y + at, result.to(y.dtype.element_ty), mask=is_column)
        token += 1
    tl.store(places, s, mask=is_used & (start >= 0))

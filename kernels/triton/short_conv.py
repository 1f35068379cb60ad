"""Short causal convolutions; for the contract see ``kernels.reference.recurrent``.

A program has one token and a tile of its channels, and reads the taps' inputs. If each row has one
token it also updates the state; otherwise a second launch does, because other programs still read
it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.inputs import StepRows
from kernels.triton.launch import launch, wait_for_prior_kernels
from kernels.triton.recurrent import begins_with_state
from kernels.triton.tiles import sigmoid

_TILE = 512
_ROWS = 128  # searched at a time for a token's own


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StepRows,
    activates: bool,
) -> torch.Tensor:
    """See ``kernels.reference.recurrent.short_conv``."""
    return _conv(x, weight, bias, state, rows, is_gated=False, activates=activates)


def gated_conv(
    fused: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StepRows,
) -> torch.Tensor:
    """See ``kernels.reference.recurrent.gated_conv``; the result is rounded once."""
    return _conv(fused, weight, bias, state, rows, is_gated=True, activates=False)


def _conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StepRows,
    *,
    is_gated: bool,
    activates: bool,
) -> torch.Tensor:
    num_tokens, num_rows = x.shape[0], rows.slots.shape[0]
    width, channels = weight.shape
    y = torch.empty((num_tokens, channels), dtype=x.dtype, device=x.device)
    tiles = -(-channels // _TILE)
    of_rows = (rows.slots, rows.query_start, rows.starts)
    shape = {"CHANNELS": channels, "KEPT": width - 1, "IS_GATED": is_gated, "TILE": _TILE}
    one_each = num_rows == num_tokens
    launch(
        _conv_kernel,
        (num_tokens, tiles),
        *(y, x, weight, bias, state, *of_rows, num_rows, x.stride(0)),
        **shape,
        ACTIVATES=activates,
        ONE_EACH=one_each,
        ROWS=_ROWS,
        num_warps=4,
    )
    if not one_each:
        grid = (num_rows, tiles)
        launch(_keep_kernel, grid, x, state, *of_rows, x.stride(0), **shape, num_warps=4)
    return y


@triton.jit
def _load_input(
    x, token, x_stride, columns, is_used, CHANNELS: tl.constexpr, IS_GATED: tl.constexpr
):
    """Load a token's convolution input, in x's dtype."""
    place = x + token * x_stride + columns
    value = tl.load(place, mask=is_used, other=0.0)
    if IS_GATED:
        by = tl.load(place + 2 * CHANNELS, mask=is_used, other=0.0)
        value = (value.to(tl.float32) * by.to(tl.float32)).to(x.dtype.element_ty)
    return value


@triton.jit(
    do_not_specialize=["num_rows", "x_stride"],
    do_not_specialize_on_alignment=["slots", "query_start", "starts"],
)
def _conv_kernel(
    y,
    x,
    weight,
    bias,
    state,
    slots,
    query_start,
    starts,
    num_rows,
    x_stride,
    CHANNELS: tl.constexpr,
    KEPT: tl.constexpr,
    IS_GATED: tl.constexpr,
    TILE: tl.constexpr,
    ACTIVATES: tl.constexpr,
    ONE_EACH: tl.constexpr,
    ROWS: tl.constexpr,
):
    wait_for_prior_kernels()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_used = columns < CHANNELS
    if ONE_EACH:
        row = token
        within = 0
    else:
        row = token * 0  # the number of rows that end at or before it
        for first in range(0, num_rows, ROWS):
            some = first + tl.arange(0, ROWS)
            ends = tl.load(query_start + 1 + some, mask=some < num_rows, other=2**31 - 1)
            row += tl.sum((ends <= token).to(tl.int64), axis=0)
        within = token - tl.load(query_start + row)
    start = tl.load(starts + row)
    lines = state + tl.load(slots + row).to(tl.int64) * KEPT * CHANNELS + columns
    newest = _load_input(x, token, x_stride, columns, is_used, CHANNELS, IS_GATED)
    by = tl.load(weight + KEPT * CHANNELS + columns, mask=is_used, other=0.0)
    total = newest.to(tl.float32) * by.to(tl.float32)
    for tap in tl.static_range(KEPT):
        before = KEPT - tap
        # Before this step's first token: from the state, whose last line is the newest.
        is_old = is_used & begins_with_state(start) & (within < before)
        value = tl.load(lines + (tap + within) * CHANNELS, mask=is_old, other=0.0)
        if not ONE_EACH:
            is_new = is_used & (within >= before)
            value += _load_input(x, token - before, x_stride, columns, is_new, CHANNELS, IS_GATED)
        by = tl.load(weight + tap * CHANNELS + columns, mask=is_used, other=0.0)
        total += value.to(tl.float32) * by.to(tl.float32)
        if ONE_EACH and tap > 0:
            tl.store(lines + (tap - 1) * CHANNELS, value, mask=is_used & (start >= 0))
    if ONE_EACH:
        tl.store(lines + (KEPT - 1) * CHANNELS, newest, mask=is_used & (start >= 0))
    if bias is not None:
        total += tl.load(bias + columns, mask=is_used, other=0.0).to(tl.float32)
    if ACTIVATES:
        total *= sigmoid(total)
    if IS_GATED:
        gate = tl.load(x + token * x_stride + CHANNELS + columns, mask=is_used, other=0.0)
        total *= gate.to(tl.float32)
    tl.store(y + token * CHANNELS + columns, total.to(y.dtype.element_ty), mask=is_used)


@triton.jit(
    do_not_specialize=["x_stride"],
    do_not_specialize_on_alignment=["slots", "query_start", "starts"],
)
def _keep_kernel(
    x,
    state,
    slots,
    query_start,
    starts,
    x_stride,
    CHANNELS: tl.constexpr,
    KEPT: tl.constexpr,
    IS_GATED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Set the state to a row's last inputs, some of which may come from the old state."""
    wait_for_prior_kernels()
    row = tl.program_id(0)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    start = tl.load(starts + row)
    is_used = (columns < CHANNELS) & (start >= 0)
    end = tl.load(query_start + row + 1).to(tl.int64)
    count = end - tl.load(query_start + row)
    lines = state + tl.load(slots + row).to(tl.int64) * KEPT * CHANNELS + columns
    # Ascending: each line is read before it is overwritten.
    for line in tl.static_range(KEPT):  # pyright: ignore[reportGeneralTypeIssues]
        before = KEPT - line
        is_old = is_used & (start > 0) & (count < before)
        value = tl.load(lines + (line + count) * CHANNELS, mask=is_old, other=0.0)
        is_new = is_used & (count >= before)
        value += _load_input(x, end - before, x_stride, columns, is_new, CHANNELS, IS_GATED)
        tl.store(lines + line * CHANNELS, value, mask=is_used)

"""Selective state spaces over prompts, a chunk of tokens at a time (Mamba-2, Dao & Gu 2024: the
state space dual).

With G_t the log decays of a chunk summed up to its token t, and S the state before it::

    y_t = e^G_t S^T C_t + sum over i <= t of e^(G_t - G_i) (C_t B_i) dt_i x_i + skip x_t
    S  <- e^G_C S + sum over i of e^(G_C - G_i) B_i (dt_i x_i)^T

Which tokens are summed together depends on where a row's step begins, so the last bits of a result
depend on how its prompt was split.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.inputs import StepRows
from kernels.recurrent import CHUNK, MIN_CHUNKED_TOKENS, ScanShape, max_chunks
from kernels.triton.chunks import decay_prefix_sums, decays, product
from kernels.triton.launch import dot_width, launch, wait_for_prior_kernels
from kernels.triton.recurrent import begins_with_state, softplus
from kernels.triton.recurrent import selective_scan as walk
from kernels.triton.tiles import clamp

_MAX_SUMS = 128 * 32  # of a state per program


def selective_scan(
    mixed: torch.Tensor,
    time_steps: torch.Tensor,
    log_a: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    rows: StepRows,
    shape: ScanShape,
) -> torch.Tensor:
    """See ``kernels.reference.recurrent.selective_scan``; mixed is contiguous."""
    factors = log_a, dt_bias, skip
    y = walk(mixed, time_steps, *factors, state, rows, shape, most=MIN_CHUNKED_TOKENS - 1)
    num_rows, wide = rows.slots.shape[0], dot_width(shape.state_size)
    if not max_chunks(mixed.shape[0], num_rows, rows.longest):
        return y
    strip = min(dot_width(shape.head_dim), _MAX_SUMS // wide)
    launch(
        _scan_chunks_kernel,
        (num_rows, shape.heads, -(-shape.head_dim // strip)),
        y,
        mixed,
        time_steps,
        *factors,
        state,
        rows.slots,
        rows.query_start,
        rows.starts,
        time_steps.stride(0),
        *(float(limit) for limit in shape.time_step_limit),
        HEADS=shape.heads,
        GROUPS=shape.groups,
        HEAD_DIM=shape.head_dim,
        SIZE=shape.state_size,
        WIDE=wide,
        CHUNK=CHUNK,
        LEAST=MIN_CHUNKED_TOKENS,
        STRIP=strip,
        # A chunk is a chain of short products: two programs of four warps on a multiprocessor wait
        # beside each other, where one of eight would wait alone.
        num_warps=4,
        num_stages=2,
    )
    return y


@triton.jit(
    do_not_specialize=["steps_stride", "least", "most"],
    do_not_specialize_on_alignment=["slots", "query_start", "starts", "time_steps"],
)
def _scan_chunks_kernel(
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
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Process a strip of columns of one head's state through one row's chunks."""
    wait_for_prior_kernels()
    CHANNELS: tl.constexpr = HEADS * HEAD_DIM + 2 * GROUPS * SIZE
    row, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    if end - begin < LEAST:
        return
    columns = tl.program_id(2) * STRIP + tl.arange(0, STRIP)
    lines, places = tl.arange(0, WIDE), tl.arange(0, CHUNK)
    is_line, is_column = lines < SIZE, columns < HEAD_DIM
    is_used = is_line[:, None] & is_column[None, :]
    start = tl.load(starts + row)
    line = (tl.load(slots + row).to(tl.int64) * HEADS + head) * SIZE * HEAD_DIM
    kept = state + line + lines[:, None] * HEAD_DIM + columns[None, :]
    s = tl.load(kept, mask=is_used & begins_with_state(start), other=0.0)
    rate = -tl.exp(tl.load(log_a + head))
    bias, through = tl.load(dt_bias + head), tl.load(skip + head)
    shared = HEADS * HEAD_DIM + head // (HEADS // GROUPS) * SIZE + lines
    at = head * HEAD_DIM + columns
    for first in range(begin, end, CHUNK):
        tokens = (first + places).to(tl.int64)
        is_token = tokens < end
        is_read = is_token[:, None] & is_line[None, :]
        is_value = is_token[:, None] & is_column[None, :]
        here = mixed + tokens[:, None] * CHANNELS
        write = tl.load(here + shared[None, :], mask=is_read, other=0.0)
        read = tl.load(here + (shared + GROUPS * SIZE)[None, :], mask=is_read, other=0.0)
        x = tl.load(here + at[None, :], mask=is_value, other=0.0)
        raw = tl.load(time_steps + tokens * steps_stride + head, mask=is_token, other=0.0)
        dt = clamp(softplus(raw.to(tl.float32) + bias), least, most)
        dt = tl.where(is_token, dt, 0.0)
        since, whole = decay_prefix_sums(rate * dt, CHUNK)
        result = product(read, s, x.dtype) * tl.exp(since)[:, None] + through * x
        added = x * dt[:, None]
        written = added * tl.exp(whole - since)[:, None]
        s = s * tl.exp(whole) + product(tl.trans(write), written, x.dtype)
        seen = product(read, tl.trans(write), x.dtype) * decays(since, CHUNK)
        result += product(seen, added, x.dtype)
        place = y + tokens[:, None] * HEADS * HEAD_DIM + at[None, :]
        tl.store(place, result.to(y.dtype.element_ty), mask=is_value)
    tl.store(kept, s, mask=is_used & (start >= 0))

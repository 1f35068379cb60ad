"""The gated delta rule over prompts, a chunk of tokens at a time (Yang et al. 2024, Parallelizing
Linear Transformers with the Delta Rule; Gated Delta Networks).

With G_t the log decays of a chunk summed up to its token t, and S the state before it::

    u_t = beta_t (v_t - e^G_t S^T k_t - sum over i < t of e^(G_t - G_i) (k_t k_i) u_i)
    y_t = e^G_t S^T q_t + sum over i <= t of e^(G_t - G_i) (q_t k_i) u_i
    S  <- e^G_C S + sum over i of e^(G_C - G_i) k_i u_i^T

The first line is a triangular system, ``(1 + A) U = beta (V - e^G K S)``, whose inverse does not
depend on the state. One kernel therefore computes everything independent of the state for all
chunks at once: the inverses, by elimination, so that nearly equal keys lose no precision, and the
factors of the second line. Another one iterates over the chunks with the state in registers.

Which tokens are summed together depends on where a row's step begins, so the last bits of a result
depend on how its prompt was split.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from kernels.inputs import StepRows
from kernels.recurrent import CHUNK, MIN_CHUNKED_TOKENS, GatedDeltaShape, max_chunks
from kernels.triton import channel_delta_chunks
from kernels.triton.chunks import (
    chunks_before,
    decay_prefix_sums,
    decays,
    inverse_of_triangle,
    product,
    row_of_chunk,
)
from kernels.triton.launch import dot_width, launch, wait_for_prior_kernels
from kernels.triton.recurrent import begins_with_state, log_decay
from kernels.triton.recurrent import gated_delta as walk
from kernels.triton.tiles import sigmoid

_STRIP = 32  # columns of a state per program


def gated_delta(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    log_a: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    rows: StepRows,
    shape: GatedDeltaShape,
) -> torch.Tensor:
    """See ``kernels.reference.recurrent.gated_delta``; mixed is contiguous."""
    if shape.decays_channels:
        return channel_delta_chunks.gated_delta(mixed, gates, log_a, dt_bias, state, rows, shape)
    y = walk(mixed, gates, log_a, dt_bias, state, rows, shape, most=MIN_CHUNKED_TOKENS - 1)
    heads, num_rows = shape.value_heads, rows.slots.shape[0]
    num_chunks = max_chunks(mixed.shape[0], num_rows, rows.longest)
    if not num_chunks:
        return y
    floats = partial(torch.empty, dtype=torch.float32, device=mixed.device)
    inverses, seen = (floats((num_chunks, heads, CHUNK, CHUNK)) for _ in range(2))
    factors = floats((num_chunks, heads, 4, CHUNK))
    meta = {
        "KEY_HEADS": shape.key_heads,
        "HEADS": heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "WIDE": dot_width(shape.key_dim),
        "CHUNK": CHUNK,
        "LEAST": MIN_CHUNKED_TOKENS,
    }
    launch(
        _prepare_kernel,
        (num_chunks, heads),
        inverses,
        seen,
        factors,
        mixed,
        gates,
        log_a,
        dt_bias,
        rows.query_start,
        gates.stride(0),
        num_rows,
        **meta,
        MOST_BETA=2.0 if shape.allows_negative else 1.0,
        LEAST_LOG=shape.least_log_decay,
        num_warps=4,
    )
    launch(
        _delta_chunks_kernel,
        (num_rows, heads, -(-shape.value_dim // _STRIP)),
        y,
        mixed,
        state,
        inverses,
        seen,
        factors,
        rows.slots,
        rows.query_start,
        rows.starts,
        **meta,
        STRIP=_STRIP,
        num_warps=4,
        num_stages=2,
    )
    return y


@triton.jit(
    do_not_specialize=["gates_stride", "num_rows"],
    do_not_specialize_on_alignment=["query_start", "gates"],
)
def _prepare_kernel(
    inverses,  # [chunks, heads, CHUNK, CHUNK] out: (1 + A)^-1, its columns times beta
    seen,  # [chunks, heads, CHUNK, CHUNK] out: what each query reads of each correction
    factors,  # [chunks, heads, 4, CHUNK] out: of k S, q S, k u, and S over the chunk
    mixed,
    gates,
    log_a,
    dt_bias,
    query_start,
    gates_stride,
    num_rows,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,
    MOST_BETA: tl.constexpr,
    LEAST_LOG: tl.constexpr,
):
    """One chunk of one head."""
    wait_for_prior_kernels()
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    chunk, head = tl.program_id(0), tl.program_id(1)
    row, index = row_of_chunk(  # pyright: ignore[reportGeneralTypeIssues]
        chunk, query_start, num_rows, CHUNK, LEAST
    )
    # The grid has an upper bound of the rows.
    if row >= num_rows:
        return
    places, keys = tl.arange(0, CHUNK), tl.arange(0, WIDE)
    begin = tl.load(query_start + row) + index * CHUNK
    count = tl.minimum(tl.load(query_start + row + 1) - begin, CHUNK)
    tokens, is_token = (begin + places).to(tl.int64), places < count

    gate = gates + tokens * gates_stride + head
    beta = MOST_BETA * sigmoid(tl.load(gate, mask=is_token, other=0.0).to(tl.float32))
    alpha = tl.load(gate + HEADS, mask=is_token, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(log_a + head))
    logs = log_decay(rate, alpha + tl.load(dt_bias + head), LEAST_LOG)
    logs = tl.where(is_token, logs, 0.0)
    since, whole = decay_prefix_sums(logs, CHUNK)

    is_read = is_token[:, None] & (keys < KEY_DIM)[None, :]
    key_head = head // (HEADS // KEY_HEADS)
    place = mixed + tokens[:, None] * CHANNELS + key_head * KEY_DIM + keys[None, :]
    k = tl.load(place + KEY_HEADS * KEY_DIM, mask=is_read, other=0.0)
    unit_k = _inverse_length(k)
    left = decays(since, CHUNK) * unit_k[None, :]
    at = (chunk.to(tl.int64) * HEADS + head) * CHUNK
    target = at * CHUNK + places[:, None] * CHUNK + places[None, :]

    a = product(k, tl.trans(k), k.dtype) * left * (beta * unit_k)[:, None]
    a = tl.where(places[:, None] > places[None, :], a, 0.0)
    tl.store(inverses + target, inverse_of_triangle(a, CHUNK, k.dtype) * beta[None, :])

    q = tl.load(place, mask=is_read, other=0.0)
    unit_q = _inverse_length(q) * (1.0 / KEY_DIM**0.5)
    tl.store(seen + target, product(q, tl.trans(k), k.dtype) * left * unit_q[:, None])
    place = factors + 4 * at + places
    tl.store(place, unit_k * tl.exp(since))
    tl.store(place + CHUNK, unit_q * tl.exp(since))
    tl.store(place + 2 * CHUNK, unit_k * tl.exp(whole - since))
    tl.store(place + 3 * CHUNK, tl.exp(whole + 0.0 * since))


@triton.jit
def _inverse_length(x):
    """Return the inverse lengths of queries or keys [CHUNK, WIDE]."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=1) + 1e-6)


@triton.jit(do_not_specialize_on_alignment=["slots", "query_start", "starts"])
def _delta_chunks_kernel(
    y,
    mixed,
    state,
    inverses,
    seen,
    factors,
    slots,
    query_start,
    starts,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Process a strip of columns of one head's state through one row's chunks."""
    wait_for_prior_kernels()
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    row, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    if end - begin < LEAST:
        return
    columns = tl.program_id(2) * STRIP + tl.arange(0, STRIP)
    keys, places = tl.arange(0, WIDE), tl.arange(0, CHUNK)
    is_key, is_column = keys < KEY_DIM, columns < VALUE_DIM
    is_used = is_key[:, None] & is_column[None, :]
    start = tl.load(starts + row)
    line = tl.load(slots + row).to(tl.int64) * HEADS + head
    kept = state + line * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + columns[None, :]
    s = tl.load(kept, mask=is_used & begins_with_state(start), other=0.0)
    key_head = head // (HEADS // KEY_HEADS)
    value = head * VALUE_DIM + columns
    at = (chunks_before(row, query_start, CHUNK, LEAST).to(tl.int64) * HEADS + head) * CHUNK
    for first in range(begin, end, CHUNK):
        tokens = (first + places).to(tl.int64)
        is_token = tokens < end
        is_read = is_token[:, None] & is_key[None, :]
        own = mixed + tokens[:, None] * CHANNELS
        place = own + key_head * KEY_DIM + keys[None, :]
        q = tl.load(place, mask=is_read, other=0.0)
        k = tl.load(place + KEY_HEADS * KEY_DIM, mask=is_read, other=0.0)
        is_value = is_token[:, None] & is_column[None, :]
        v = tl.load(own + 2 * KEY_HEADS * KEY_DIM + value[None, :], mask=is_value, other=0.0)
        square = at * CHUNK + places[:, None] * CHUNK + places[None, :]
        factor = factors + 4 * at + places
        recalled = product(k, s, k.dtype) * tl.load(factor)[:, None]
        u = product(tl.load(inverses + square), v.to(tl.float32) - recalled, k.dtype)
        result = product(q, s, k.dtype) * tl.load(factor + CHUNK)[:, None]
        result += product(tl.load(seen + square), u, k.dtype)
        u *= tl.load(factor + 2 * CHUNK)[:, None]
        s = s * tl.load(factors + 4 * at + 3 * CHUNK) + product(tl.trans(k), u, k.dtype)
        place = y + tokens[:, None] * HEADS * VALUE_DIM + value[None, :]
        tl.store(place, result.to(y.dtype.element_ty), mask=is_value)
        at += HEADS * CHUNK
    tl.store(kept, s, mask=is_used & (start >= 0))

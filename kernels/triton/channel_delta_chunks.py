"""The gated delta rule with decays by channel over prompts, a chunk of tokens at a time (Kimi Team
2025, Kimi Linear).

``delta_chunks.py`` with a decay for each line of the state: G_t is a vector, and e^(G_t - G_i)
stands within the products of queries and keys::

    A_ti = sum over channels d of k_t[d] e^(G_t[d] - G_i[d]) k_i[d]

To split it between the factors of a product is to refer both to one token's G, r: e^(G_t - G_r) and
e^(G_r - G_i). Neither exceeds 1 if r lies between i and t, but no r lies between all pairs. It does
between those of two neighbouring runs of tokens, r where they meet; and pairs of all distances are
those of neighbouring runs of 1, 2, 4 .. 32 tokens::

      i  0 1 2 3 4 5 6 7
    t 0  .                    runs of 1, where r is the border
      1  1 .                  of 0 | 1, 2 | 3, 4 | 5, 6 | 7
      2  2 2 .                runs of 2: of 0 1 | 2 3, 4 5 | 6 7
      3  2 2 1 .
      4  4 4 4 4 .            runs of 4: of 0 1 2 3 | 4 5 6 7
      5  4 4 4 4 1 .
      6  4 4 4 4 2 2 .
      7  4 4 4 4 2 2 1 .

For each length one product over the whole chunk gives the pairs of all its runs. A token is before
its run's border or after it, so that its key has the same factor on either side of that product.
The logarithms between a token and the border are summed, not subtracted: that is exact for the
smallest decays beside the greatest.

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
from kernels.triton.chunks import (
    add_product,
    chunks_before,
    inverse_of_triangle,
    product,
    row_of_chunk,
)
from kernels.triton.launch import (
    has_tensor_memory,
    launch,
    power_of_2,
    wait_for_prior_kernels,
)
from kernels.triton.recurrent import begins_with_state, log_decay
from kernels.triton.recurrent import gated_delta as walk
from kernels.triton.tiles import sigmoid

_STRIP = 32  # columns of a state per program
# Channels that are prepared at a time. With 16 and 32 products came out wrong on an H200 (Triton
# 3.6), though not in the interpreter; models have more.
_BLOCK = 64
_MAX_AHEAD = 128  # channels of a head whose next chunk is read ahead
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# The least logarithm of a decay, to base 2. It is a decay to 0 already; infinite ones could not be
# summed by a product.
_FLOOR: tl.constexpr = tl.constexpr(-256.0)


def gated_delta(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    log_a: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    rows: StepRows,
    shape: GatedDeltaShape,
) -> torch.Tensor:
    """See ``kernels.reference.recurrent.gated_delta``; mixed is contiguous, and decays are by
    channel.
    """
    y = walk(mixed, gates, log_a, dt_bias, state, rows, shape, most=MIN_CHUNKED_TOKENS - 1)
    heads, num_rows = shape.value_heads, rows.slots.shape[0]
    wide = max(_BLOCK, power_of_2(shape.key_dim))
    num_chunks = max_chunks(mixed.shape[0], num_rows, rows.longest)
    if not num_chunks:
        return y
    # Of bfloat16 two numbers are kept for one in float32: a chunk's programs need not split it.
    is_split = mixed.dtype == torch.bfloat16
    dtype, parts = (torch.bfloat16, 2) if is_split else (torch.float32, 1)
    kept, places = partial(torch.empty, device=mixed.device), (num_chunks, heads)
    recalling, writing = (kept((*places, parts, CHUNK, wide), dtype=dtype) for _ in range(2))
    # Corrections of keys that are nearly the same nearly cancel out in what a query reads of them.
    seen = kept((*places, parts, CHUNK, CHUNK), dtype=dtype)
    reading = kept((*places, CHUNK, wide), dtype=mixed.dtype)
    alone = kept((*places, CHUNK, shape.value_dim), dtype=torch.float32)
    fading = kept((*places, wide), dtype=torch.float32)
    scratch = recalling, writing, reading, seen, alone, fading
    meta = {
        "HEADS": heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "WIDE": wide,
        "CHUNK": CHUNK,
        "LEAST": MIN_CHUNKED_TOKENS,
        "PARTS": parts,
    }
    # Where sums have memory of their own, each product of a loop takes another part of it. Those of
    # float32, of three products each, fit without the loop alone.
    has_loop = is_split or not has_tensor_memory(mixed.device)
    launch(
        _prepare_channels_kernel,
        (num_chunks, heads),
        *scratch,
        mixed,
        gates,
        log_a,
        dt_bias,
        rows.query_start,
        gates.stride(0),
        num_rows,
        **meta,
        KEY_HEADS=shape.key_heads,
        MOST_BETA=2.0 if shape.allows_negative else 1.0,
        LEAST_LOG=shape.least_log_decay,
        BLOCK=_BLOCK if has_loop else wide,
        num_warps=4 if has_loop else 8,
    )
    launch(
        _channel_delta_chunks_kernel,
        (num_rows, heads, -(-shape.value_dim // _STRIP)),
        y,
        *scratch,
        state,
        rows.slots,
        rows.query_start,
        rows.starts,
        **meta,
        STRIP=_STRIP,
        num_warps=4,
        # A chunk of wide keys fits into shared memory once.
        num_stages=2 if wide <= _MAX_AHEAD else 1,
    )
    return y


@triton.jit(
    do_not_specialize=["gates_stride", "num_rows"],
    do_not_specialize_on_alignment=["query_start", "gates"],
)
def _prepare_channels_kernel(
    recalling,  # [chunks, heads, PARTS, CHUNK, WIDE] out: corrections by the state before the chunk
    writing,  # [chunks, heads, PARTS, CHUNK, WIDE] out: keys that write the state after it
    reading,  # [chunks, heads, CHUNK, WIDE] out: queries that read the state before it
    seen,  # [chunks, heads, PARTS, CHUNK, CHUNK] out: what each query reads of each correction
    alone,  # [chunks, heads, CHUNK, VALUE_DIM] out: corrections if that state is zero
    fading,  # [chunks, heads, WIDE] out: the decay of that state over the chunk
    mixed,
    gates,
    log_a,
    dt_bias,
    query_start,
    gates_stride,
    num_rows,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,
    PARTS: tl.constexpr,  # 2 of bfloat16, or 1 of float32
    KEY_HEADS: tl.constexpr,
    MOST_BETA: tl.constexpr,
    LEAST_LOG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of one head."""
    wait_for_prior_kernels()
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    WHOLE: tl.constexpr = CHUNK * WIDE
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    chunk, head = tl.program_id(0), tl.program_id(1)
    row, index = row_of_chunk(  # pyright: ignore[reportGeneralTypeIssues]
        chunk, query_start, num_rows, CHUNK, LEAST
    )
    # The grid has an upper bound of the rows.
    if row >= num_rows:
        return
    places = tl.arange(0, CHUNK)
    t, i = places[:, None], places[None, :]
    begin = tl.load(query_start + row) + index * CHUNK
    count = tl.minimum(tl.load(query_start + row + 1) - begin, CHUNK)
    is_token = t < count
    at = chunk.to(tl.int64) * HEADS + head
    rate = -tl.exp(tl.load(log_a + head))
    # Scalars have what does not fit into 32 bits.
    gates += begin.to(tl.int64) * gates_stride
    alphas = gates + HEADS + head * KEY_DIM
    mixed += begin.to(tl.int64) * CHANNELS
    queries = mixed + head // (HEADS // KEY_HEADS) * KEY_DIM
    keys = queries + KEY_HEADS * KEY_DIM
    values = mixed + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    recalling += at * PARTS * WHOLE
    writing += at * PARTS * WHOLE
    reading += at * WHOLE

    # The logarithms wait where the corrections will be.
    lengths = tl.zeros([CHUNK], tl.float32)
    unit_q, unit_k, own = lengths, lengths, lengths
    for first in range(0, WIDE, BLOCK):
        line = first + tl.arange(0, BLOCK)[None, :]
        is_key = line < KEY_DIM
        q = tl.load(queries + (t * CHANNELS + line), mask=is_token & is_key, other=0.0)
        k = tl.load(keys + (t * CHANNELS + line), mask=is_token & is_key, other=0.0)
        q, k = q.to(tl.float32), k.to(tl.float32)
        unit_q += tl.sum(q * q, axis=1)
        unit_k += tl.sum(k * k, axis=1)
        own += tl.sum(q * k, axis=1)
        raw = tl.load(alphas + (t * gates_stride + line), mask=is_token & is_key, other=0.0)
        bias = tl.load(dt_bias + head * KEY_DIM + line, mask=is_key, other=0.0)
        logs = log_decay(rate, raw.to(tl.float32) + bias, LEAST_LOG) * _LOG2_E
        logs = tl.maximum(logs, _FLOOR, propagate_nan=tl.PropagateNan.ALL)
        logs = tl.where(is_token & is_key, logs, 0.0)
        total = tl.sum(logs, axis=0, keep_dims=True)
        tl.store(fading + at * WIDE + line, tl.exp2(total))
        _keep(recalling + (t * WIDE + line), WHOLE, logs)
    unit_q = tl.rsqrt(unit_q + 1e-6)[:, None] * (1.0 / KEY_DIM**0.5)
    unit_k = tl.rsqrt(unit_k + 1e-6)[:, None]
    tl.debug_barrier()  # other threads read it

    # Below the diagonal [t, i] of keys; on it and above it [i, t], what queries t read of keys i.
    # Nothing decays between a token and itself.
    pairs = tl.where(i == t, own[:, None], 0.0)
    run = 1
    while run < CHUNK:
        own_run, is_after = places & -run, (places & run) != 0
        begins = tl.where(is_after, own_run, places + 1)[None, :]
        ends = tl.where(is_after, places, own_run + run - 1)[None, :]
        # The interpreter converts no truth values to bfloat16.
        is_summed = tl.trans(tl.where((t >= begins) & (t <= ends), 1.0, 0.0).to(DTYPE))
        of_keys = tl.zeros([CHUNK, CHUNK], tl.float32)
        of_queries = of_keys
        for first in range(0, WIDE, BLOCK):
            line = first + tl.arange(0, BLOCK)[None, :]
            logs, rest = _load_kept(recalling + (t * WIDE + line), WHOLE)
            decay = _decays(is_summed, logs, rest)
            # From the cache again: in registers they would displace the rest.
            is_read, place = is_token & (line < KEY_DIM), t * CHANNELS + line
            k = tl.load(keys + place, mask=is_read, other=0.0)
            q = tl.load(queries + place, mask=is_read, other=0.0)
            of_keys, of_queries = _add_products(of_keys, of_queries, k * decay, q * decay, DTYPE)
        # A pair's last value is that of the longest runs in which it is apart.
        is_apart = own_run[:, None] != own_run[None, :]
        pairs = tl.where(is_apart, tl.where(i < t, of_keys, of_queries), pairs)
        run *= 2
    read = tl.trans(tl.where(i >= t, pairs, 0.0)) * unit_q * tl.trans(unit_k)
    seen += at * PARTS * CHUNK * CHUNK
    _keep(seen + (t * CHUNK + i), CHUNK * CHUNK, read)

    raw = tl.load(gates + (t * gates_stride + head), mask=is_token, other=0.0)
    beta = MOST_BETA * sigmoid(raw.to(tl.float32))
    a = tl.where(i < t, pairs, 0.0) * (beta * unit_k) * tl.trans(unit_k)
    inverse = inverse_of_triangle(a, CHUNK, DTYPE) * tl.trans(beta)
    until = tl.where(i <= t, 1.0, 0.0).to(DTYPE)
    since = tl.where(i > t, 1.0, 0.0).to(DTYPE)
    for first in range(0, WIDE, BLOCK):
        line = first + tl.arange(0, BLOCK)[None, :]
        is_read, place = is_token & (line < KEY_DIM), t * CHANNELS + line
        k = tl.load(keys + place, mask=is_read, other=0.0) * unit_k
        q = tl.load(queries + place, mask=is_read, other=0.0) * unit_q
        place = t * WIDE + line
        logs, rest = _load_kept(recalling + place, WHOLE)
        _keep(writing + place, WHOLE, k * _decays(since, logs, rest))
        decay = _decays(until, logs, rest)
        tl.store(reading + place, (q * decay).to(DTYPE))
        tl.debug_barrier()  # all threads have read it
        _keep(recalling + place, WHOLE, product(inverse, k * decay, DTYPE))
    alone += at * CHUNK * VALUE_DIM
    for first in range(0, VALUE_DIM, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        is_value = column < VALUE_DIM
        v = tl.load(values + (t * CHANNELS + column), mask=is_token & is_value, other=0.0)
        tl.store(alone + (t * VALUE_DIM + column), product(inverse, v, DTYPE), mask=is_value)


@triton.jit
def _decays(is_summed, logs, rest):
    """Return the decays [CHUNK, BLOCK] over those tokens that [CHUNK, CHUNK] tells for each."""
    sums = product(is_summed, logs, is_summed.dtype)
    return tl.exp2(add_product(sums, is_summed, rest) if logs.dtype == tl.bfloat16 else sums)


@triton.jit
def _add_products(total_x, total_y, x, y, DTYPE: tl.constexpr):
    """Add ``product(x, x^T)`` and ``product(x, y^T)`` of float32 [CHUNK, BLOCK].

    What bfloat16 splits is turned afterwards: as columns it would be converted one by one.
    """
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        high, low = _split(x)  # pyright: ignore[reportGeneralTypeIssues]
        turned, rest = tl.trans(high), tl.trans(low)
        total_x = add_product(total_x, high, turned)
        total_x = add_product(add_product(total_x, high, rest), low, turned)
        turned, rest = _split(y)  # pyright: ignore[reportGeneralTypeIssues]
        turned, rest = tl.trans(turned), tl.trans(rest)
        total_y = add_product(total_y, high, turned)
        total_y = add_product(add_product(total_y, high, rest), low, turned)
    else:
        total_x += product(x, tl.trans(x), DTYPE)
        total_y += product(x, tl.trans(y), DTYPE)
    return total_x, total_y


@triton.jit
def _split(x):
    """Return float32 as bfloat16, cut off, and what remains, rounded: 16 bits together."""
    cut = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return cut.to(tl.bfloat16), (x - cut).to(tl.bfloat16)


@triton.jit
def _keep(place, size, x):
    """Store ``x``; as bfloat16 with what remains ``size`` elements behind."""
    if place.dtype.element_ty == tl.bfloat16:
        high, low = _split(x)  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(place, high)
        tl.store(place + size, low)
    else:
        tl.store(place, x)


@triton.jit
def _load_kept(place, size):
    """Load what ``_keep`` has stored: float32 alone, twice, or bfloat16 and what remains."""
    high = tl.load(place)
    if high.dtype == tl.bfloat16:
        return high, tl.load(place + size)
    else:
        return high, high


@triton.jit
def _kept_product(high, low, b, DTYPE: tl.constexpr):
    """``product`` of what ``_load_kept`` has returned and float32."""
    result = product(high, b, DTYPE)
    return add_product(result, low, b.to(tl.bfloat16)) if high.dtype == tl.bfloat16 else result


@triton.jit(do_not_specialize_on_alignment=["slots", "query_start", "starts"])
def _channel_delta_chunks_kernel(
    y,
    recalling,  # as prepared, all of them
    writing,
    reading,
    seen,
    alone,
    fading,
    state,
    slots,
    query_start,
    starts,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,
    PARTS: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Process a strip of columns of one head's state through one row's chunks."""
    wait_for_prior_kernels()
    WHOLE: tl.constexpr = CHUNK * WIDE
    SQUARE: tl.constexpr = CHUNK * CHUNK
    DTYPE: tl.constexpr = y.dtype.element_ty
    row, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    if end - begin < LEAST:
        return
    columns = tl.program_id(2) * STRIP + tl.arange(0, STRIP)
    keys, places = tl.arange(0, WIDE), tl.arange(0, CHUNK)
    is_column = (columns < VALUE_DIM)[None, :]
    is_used = (keys < KEY_DIM)[:, None] & is_column
    start = tl.load(starts + row)
    line = tl.load(slots + row).to(tl.int64) * HEADS + head
    stored = state + line * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + columns[None, :]
    s = tl.load(stored, mask=is_used & begins_with_state(start), other=0.0)
    by_token = places[:, None] * CHUNK + places[None, :]
    by_key = places[:, None] * WIDE + keys[None, :]
    by_column = places[:, None] * VALUE_DIM + columns[None, :]
    at = chunks_before(row, query_start, CHUNK, LEAST).to(tl.int64) * HEADS + head
    for first in range(begin, end, CHUNK):
        kept = at * PARTS * WHOLE + by_key
        u = tl.load(alone + at * CHUNK * VALUE_DIM + by_column, mask=is_column, other=0.0)
        high, low = _load_kept(recalling + kept, WHOLE)
        u -= _kept_product(high, low, s, DTYPE)
        result = product(tl.load(reading + at * WHOLE + by_key), s, DTYPE)
        high, low = _load_kept(seen + at * PARTS * SQUARE + by_token, SQUARE)
        result += _kept_product(high, low, u, DTYPE)
        s *= tl.load(fading + at * WIDE + keys)[:, None]
        high, low = _load_kept(writing + kept, WHOLE)
        s += _kept_product(tl.trans(high), tl.trans(low), u, DTYPE)
        tokens = (first + places).to(tl.int64)[:, None]
        place = y + (tokens * HEADS + head) * VALUE_DIM + columns[None, :]
        tl.store(place, result.to(DTYPE), mask=(tokens < end) & is_column)
        at += HEADS
    tl.store(stored, s, mask=is_used & (start >= 0))

"""Products of few rows, fused with their neighbours in a decoder layer.

A step of one or two sequences reads every weight once and multiplies it once or twice: it is bound
by memory and, for small weights, by the latency between the reads. Therefore

- each program requests its rows of the weight before it waits for its turn (``launch.py``), which
  keeps the memory busy while the previous kernels finish. Weights are never written during a step;
- the norm before a product and the sum after it are part of it. ``norm(x) W^T`` is
  ``(x * n) W^T / rms(x)``: the mean square is summed along with the product, and nothing waits for
  it;
- matrix units, whose tiles have at least 16 rows, are not used: a thread multiplies what it has
  read.

Experts are chosen by the previous kernel, so their weights cannot be read ahead. Each pair of token
and choice is a separate row: few tokens seldom share an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.skinny import MAX_SKINNY_ROWS, GateKind, RowNorm
from kernels.triton.launch import launch, power_of_2, wait_for_prior_kernels
from kernels.triton.tiles import gelu_tanh, silu

_TILE = 16384  # weights of a program in registers; as many in flight
_TILE_OF_ROWS = 8192  # with several rows, whose sums take registers too
_PROGRAMS = 256  # at least, for small weights: two per multiprocessor
_MIN_OUTPUTS = 4
_DEPTH = 1024  # inputs per tile, with many outputs: 16 bytes of each per thread
_REGISTERS = 168  # of a thread, with all inputs at once: three programs on a multiprocessor
_TERMS: tl.constexpr = tl.constexpr(8)  # adjacent inputs that a thread sums first


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    gate: GateKind | None = None,
    stream: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    experts: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``kernels.reference.skinny``; up to ``MAX_SKINNY_ROWS`` rows, or any number with
    ``experts``; all contiguous."""
    inputs, parts = x.shape[1], 1 if gate is None else 2
    outputs = weight.shape[-2] // parts
    rows = schedule_rows(x, experts)
    output = stream
    if output is None:
        output = torch.empty((rows.num_results, outputs), dtype=dtype or x.dtype, device=x.device)
    widest = max(power_of_2(inputs), _TERMS.value)
    tile = _TILE if rows.rows_per_program == 1 else _TILE_OF_ROWS
    made = outputs_per_program(outputs * rows.num_programs, tile // min(widest, _DEPTH) // parts)
    depth = min(widest, tile // made // parts)
    # Sums into the stream have few outputs: each is a long row, for more threads.
    num_warps = 8 if stream is not None and tile == _TILE else 4
    is_whole = experts is None and rows.rows_per_program == 1 and inputs <= depth
    is_whole = is_whole and (num_warps == 8 or depth <= _DEPTH)
    launch(
        _skinny_kernel,
        (-(-outputs // made), rows.num_programs),
        output,
        x,
        weight,
        bias,
        experts,
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        rows.rows_per_program,
        inputs,
        outputs,
        row_stride(x),
        weight.stride(-2),
        PAIRS_PER_ROW=rows.pairs_per_row,
        ROWS=1 if rows.rows_per_program == 1 else MAX_SKINNY_ROWS,
        MADE=made,
        DEPTH=depth,
        IS_WHOLE=is_whole,
        PARTS=parts,
        GATE=gate,
        ADDS=stream is not None,
        num_warps=num_warps,
        maxnreg=_REGISTERS if is_whole and num_warps == 4 and x.itemsize == 2 else None,
    )
    return output


class RowSchedule(NamedTuple):
    """The rows of a product, and how they are distributed."""

    num_results: int
    num_programs: int  # that share an output
    rows_per_program: int
    pairs_per_row: int  # pairs of token and choice with the same row


def schedule_rows(x: torch.Tensor, experts: torch.Tensor | None) -> RowSchedule:
    """Return all rows of x [n, inputs] together; or experts [n, choices] one by one."""
    num_rows = x.shape[0]
    if experts is None:
        assert num_rows <= MAX_SKINNY_ROWS, num_rows
        return RowSchedule(num_rows, min(num_rows, 1), num_rows, 1)
    num_pairs = experts.numel()
    return RowSchedule(num_pairs, num_pairs, 1, num_pairs // max(num_rows, 1))


def row_stride(x: torch.Tensor) -> int:
    """Return the stride of [n, inputs]; that of a single row is arbitrary and must not
    recompile."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def outputs_per_program(outputs: int, most: int) -> int:
    """Return the outputs per program: fewer if there are few, so that all multiprocessors read."""
    wanted = power_of_2(outputs // _PROGRAMS + 1) // 2
    return min(max(wanted, _MIN_OUTPUTS), most)


# Steps of two, three and four rows share a kernel.
@triton.jit(do_not_specialize=["num_rows"])
def _skinny_kernel(
    output,
    x,
    weight,
    bias,
    experts,  # of each pair of token and choice; None: one weight
    norm_weight,
    eps,
    num_rows,
    inputs,
    outputs,
    x_stride,
    weight_stride,
    PAIRS_PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    MADE: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # a tile has all inputs
    PARTS: tl.constexpr,  # of an output: with a gate, both halves
    GATE: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Some outputs of all rows; each thread sums its inputs' part, and all parts are added last."""
    begin = tl.program_id(0) * MADE
    lines = weight_rows(begin, outputs, MADE, PARTS)
    depth = tl.arange(0, DEPTH)
    weights = weight + (lines.to(tl.int64) * weight_stride)[:, None] + depth[None, :]
    is_deep = (depth < inputs)[None, :]
    if experts is None:
        tile = tl.load(weights, mask=is_deep, other=0.0)
    wait_for_prior_kernels()
    if experts is not None:
        pair = tl.program_id(1).to(tl.int64)
        x += pair // PAIRS_PER_ROW * x_stride
        output += pair * outputs
        before = tl.load(experts + pair) * outputs * PARTS
        lines += before
        weights += before * weight_stride
        tile = tl.load(weights, mask=is_deep, other=0.0)

    sums = (tl.zeros([MADE * PARTS, DEPTH // _TERMS], tl.float32),) * ROWS
    squares = (tl.zeros([DEPTH], tl.float32),) * ROWS
    for first in range(0, inputs, DEPTH):
        here = first + depth
        wide = tile.to(tl.float32)
        # A second tile's registers would keep the next kernel from being resident.
        if not IS_WHOLE:
            ahead = here + DEPTH < inputs
            tile = tl.load(weights + first + DEPTH, mask=ahead[None, :], other=0.0)
        new_sums, new_squares = (), ()
        for row in tl.static_range(ROWS):  # pyright: ignore[reportGeneralTypeIssues]
            # Rows past the end repeat the last one.
            place = x + tl.minimum(row, num_rows - 1) * x_stride + here
            read = tl.load(place, mask=here < inputs, other=0.0).to(tl.float32)
            new_squares += (squares[row] + read * read,)
            if norm_weight is not None:
                read *= tl.load(norm_weight + here, mask=here < inputs, other=0.0).to(tl.float32)
            terms = tl.reshape(wide * read[None, :], [MADE * PARTS, DEPTH // _TERMS, _TERMS])
            new_sums += (sums[row] + tl.sum(terms, axis=2),)
        sums, squares = new_sums, new_squares

    for row in tl.static_range(ROWS):  # pyright: ignore[reportGeneralTypeIssues]
        result = tl.sum(sums[row], axis=1)
        if norm_weight is not None:
            result *= tl.rsqrt(tl.sum(squares[row], axis=0) / inputs + eps)
        store_outputs(
            output,
            result,
            bias,
            lines,
            begin,
            outputs,
            row,
            num_rows,
            x.dtype.element_ty,
            MADE,
            PARTS,
            GATE,
            ADDS,
        )


@triton.jit
def weight_rows(begin, outputs, MADE: tl.constexpr, PARTS: tl.constexpr):
    """Return the weight's rows for outputs from ``begin`` on, [MADE * PARTS].

    Each gated output has two, adjacent. Past the end the last one is repeated.
    """
    places = tl.arange(0, MADE * PARTS)
    return tl.minimum(begin + places // PARTS, outputs - 1) + places % PARTS * outputs


@triton.jit
def store_outputs(
    output,
    result,  # [MADE * PARTS] float32, of the weight's rows ``lines``
    bias,
    lines,
    begin,
    outputs,
    row,
    num_rows,
    DTYPE: tl.constexpr,
    MADE: tl.constexpr,
    PARTS: tl.constexpr,
    GATE: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Store or add one row's outputs from ``begin`` on, with bias and gate."""
    if bias is not None:
        result += tl.load(bias + lines).to(tl.float32)
    if GATE is not None:
        # Rounded as if read from memory.
        rounded = result.to(DTYPE).to(tl.float32)
        opened, gated = tl.split(tl.reshape(rounded, [MADE, PARTS]))
        result = (silu(opened) if GATE == "silu" else gelu_tanh(opened)) * gated
    made = begin + tl.arange(0, MADE)
    place = output + row * outputs + made
    is_made = (made < outputs) & (row < num_rows)
    if ADDS:
        result += tl.load(place, mask=is_made, other=0.0).to(tl.float32)
    tl.store(place, result.to(output.dtype.element_ty), mask=is_made)

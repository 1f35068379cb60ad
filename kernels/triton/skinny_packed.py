"""Products of one row with quantised weights: ``skinny.py`` for the weights of ``quantised.py``.

A thread has 16 bytes of an output's codes at a time. Each half of these bytes is a run of adjacent
inputs that share one scale and one zero. The codes of a run are widened and multiplied as they are,
and what is common to them is applied once, to their sum: ``sum((level - zero) * scale * x) = scale
* (sum(level * x) - zero * sum(x))``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.skinny import GateKind, RowNorm
from kernels.tiled import BLOCK, TiledWeight
from kernels.triton.codes import DECODE_FACTORS, DECODE_OFFSETS, decode_codes, load_scales
from kernels.triton.launch import launch, power_of_2, wait_for_prior_kernels
from kernels.triton.skinny import (
    outputs_per_program,
    row_stride,
    store_outputs,
    weight_rows,
)

_TILE = 8192  # bytes of codes that a program has in registers, and as many in flight
_WIDTH = 1024  # bytes of an output, with many outputs
_UNROLLED = 4  # tiles


def skinny_packed_linear(
    x: torch.Tensor,
    weight: TiledWeight,
    bias: torch.Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    gate: GateKind | None = None,
    stream: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    experts: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``kernels.reference.skinny``, with one quantised matrix or those of experts.

    Several rows are multiplied one by one, and each reads the weight.
    """
    held, parts = weight.codes.shape[1], 1 if gate is None else 2
    outputs = weight.outputs // parts
    num_rows = x.shape[0] if experts is None else experts.numel()
    output = stream
    if output is None:
        output = torch.empty((num_rows, outputs), dtype=dtype or x.dtype, device=x.device)
    widest = power_of_2(held)
    # A table of levels needs registers for addresses, as do reordered inputs.
    has_addresses = weight.kind == "table" or weight.orders is not None
    tile = _TILE // (2 if has_addresses else 1)
    made = outputs_per_program(outputs * num_rows, max(1, tile // min(widest, _WIDTH) // parts))
    width = min(widest, tile // made // parts)
    launch(
        _skinny_packed_kernel,
        (-(-outputs // made), num_rows),
        output,
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.levels,
        weight.orders,
        bias,
        experts,
        None if norm is None else norm.weight,
        weight.factor,
        0.0 if norm is None else norm.eps,
        weight.inputs,
        outputs,
        row_stride(x),
        PAIRS_PER_ROW=num_rows // max(x.shape[0], 1),
        MADE=made,
        HELD=held,
        WIDTH=width,
        UNROLLED=min(_UNROLLED, -(-held // width)),
        PARTS=parts,
        GATE=gate,
        ADDS=stream is not None,
        GROUP=weight.group_size,
        GROUPS=weight.num_groups,
        KIND=weight.kind,
        LIFT=DECODE_FACTORS.get(weight.kind, 1.0),
        OFFSET=DECODE_OFFSETS.get(weight.kind, 0.0),
        CODES_A_BYTE=weight.codes_per_byte,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return output


@triton.jit
def _skinny_packed_kernel(
    output,
    x,
    codes,
    scales,
    zeros,
    levels,
    order,  # [matrices, inputs], input of each column of the codes; None: in order
    bias,
    experts,  # of each pair of token and choice; None: one matrix
    norm_weight,
    factor,
    eps,
    inputs,
    outputs,
    x_stride,
    PAIRS_PER_ROW: tl.constexpr,
    MADE: tl.constexpr,
    HELD: tl.constexpr,  # bytes of codes per output
    WIDTH: tl.constexpr,
    UNROLLED: tl.constexpr,
    PARTS: tl.constexpr,  # of an output: with a gate, both halves
    GATE: tl.constexpr,
    ADDS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    LIFT: tl.constexpr,
    OFFSET: tl.constexpr,
    CODES_A_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some outputs; each thread sums its inputs' part, and all parts are added last."""
    LINES: tl.constexpr = MADE * PARTS
    RUNS: tl.constexpr = WIDTH // BLOCK
    begin = tl.program_id(0) * MADE
    lines = weight_rows(begin, outputs, MADE, PARTS)
    byte, run = tl.arange(0, WIDTH), tl.arange(0, RUNS)
    places = codes + (lines.to(tl.int64) * HELD)[:, None] + byte[None, :]
    is_held = (byte < HELD)[None, :]
    if experts is None:
        tile = tl.load(places, mask=is_held, other=0)
    wait_for_prior_kernels()
    pair = tl.program_id(1).to(tl.int64)
    x += pair // PAIRS_PER_ROW * x_stride
    output += pair * outputs
    if experts is not None:
        expert = tl.load(experts + pair)
        before = expert * outputs * PARTS
        lines += before
        places += before * HELD
        if order is not None:
            order += expert * inputs
        tile = tl.load(places, mask=is_held, other=0)

    sums = tl.zeros([LINES, RUNS], tl.float32)
    squares = tl.zeros([WIDTH], tl.float32)
    # A tile carried across iterations takes four times the registers, one per byte: so, rarely.
    for chunk in range(0, HELD, UNROLLED * WIDTH):
        for part_of_chunk in tl.static_range(UNROLLED):  # pyright: ignore[reportGeneralTypeIssues]
            first = chunk + part_of_chunk * WIDTH
            ahead = first + WIDTH + byte < HELD
            next_tile = tl.load(places + first + WIDTH, mask=ahead[None, :], other=0)
            for half in tl.static_range(CODES_A_BYTE):  # pyright: ignore[reportGeneralTypeIssues]
                level = decode_codes(tile, levels, half, KIND)
                place = ((first + byte) // BLOCK * CODES_A_BYTE + half) * BLOCK + byte % BLOCK
                is_input = place < inputs
                if order is not None:
                    place = tl.load(order + place, mask=is_input, other=0)
                if zeros is not None or GROUPS > 1:
                    start = ((first // BLOCK + run) * CODES_A_BYTE + half) * BLOCK
                    group = tl.minimum(start // GROUP, GROUPS - 1)
                    own = lines.to(tl.int64)[:, None] * GROUPS + group[None, :]
                if zeros is not None:
                    zero = tl.load(zeros + own).to(tl.float32)
                if GROUPS > 1:
                    scale = load_scales(scales + own)
                read = tl.load(x + place, mask=is_input, other=0.0).to(tl.float32)
                squares += read * read
                if norm_weight is not None:
                    by = tl.load(norm_weight + place, mask=is_input, other=0.0)
                    read *= by.to(tl.float32)
                part = tl.sum(tl.reshape(level * read[None, :], [LINES, RUNS, BLOCK]), axis=2)
                if zeros is not None or OFFSET != 0.0:
                    total = tl.sum(tl.reshape(read, [RUNS, BLOCK]), axis=1)
                    if zeros is not None:
                        part = part * LIFT - (zero + OFFSET) * total[None, :]
                    else:
                        part -= OFFSET * total[None, :]
                if GROUPS > 1:
                    part *= scale
                sums += part
            tile = next_tile

    whole = factor
    if zeros is None:
        whole *= LIFT
    result = tl.sum(sums, axis=1) * whole
    if GROUPS == 1:
        result *= load_scales(scales + lines)
    if norm_weight is not None:
        result *= tl.rsqrt(tl.sum(squares, axis=0) / inputs + eps)
    store_outputs(
        *(output, result, bias, lines, begin, outputs, 0, 1),
        *(x.dtype.element_ty, MADE, PARTS, GATE, ADDS),
    )

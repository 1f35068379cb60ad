"""Grouped matrix products: each tile of rows, sorted by expert, with its expert's weights.

    dense weights ──────────────────────────────────────────────────► products
    codes ─► registers, in each tile of rows ───────────────────────► products   (few rows)
    codes of some experts ─► memory, once ─► their tiles' products ─► the next   (many rows)

With codes and many rows, experts are widened one slice after another (``widening.py`` has when, and
what that takes). The host does not know how many tiles a slice's experts have: it launches an equal
share of them, and a program takes another tile if there are more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.moe import ExpertMatrices
from kernels.tiled import TiledWeight
from kernels.triton.launch import (
    launch,
    power_of_2,
    shared_memory_bytes,
    stages_that_fit,
    wait_for_prior_kernels,
)
from kernels.triton.matmul import WIDE_SHARED_BYTES
from kernels.triton.packed_tiles import (
    kernel_params,
    num_input_tiles,
    packed_product,
    scales_sums,
)
from kernels.triton.quantised import is_turned, num_stages, tile_shape
from kernels.triton.routing import Routing
from kernels.triton.tiles import dot_add
from kernels.triton.widening import MAX_PACKED_TILE_ROWS, matrices_at_once, widen_lines

_DEPTH = 64
# Outputs and stages of a tile. With few rows, outputs and rows swap roles in the instruction, as in
# ``matmul.py``, so that a row's result has the same bits for any height and width of a tile.
_FEW_ROWS, _FEW_SHAPE, _SHAPE, _WIDE_SHAPE = 64, (64, 8), (128, 4), (256, 3)


def grouped_matmul(
    x: torch.Tensor,
    weights: ExpertMatrices,
    routing: Routing,
    pairs_per_row: int,
    factors: torch.Tensor | None,
    biases: torch.Tensor | None = None,
    *,
    invariant: bool = False,
) -> torch.Tensor:
    """``(x[pair // pairs_per_row] @ weights[expert]^T + bias) * factor``, [pairs, outputs].

    Args:
        x: [rows, inputs].
        weights: [experts, outputs, inputs], with any strides, or in codes.
        routing: the assignment of pairs to experts.
        pairs_per_row: pairs that share a row of x.
        factors: one per pair, float32, or None.
        biases: [experts, outputs] contiguous, or None.
        invariant: a pair has the same bits in any batch: no product is fused with the following
            sum, without rounding between, and codes are widened in registers for any number of rows
            (weights in memory are rounded after their scales, and summed in another order).
    """
    is_packed = isinstance(weights, TiledWeight)
    output = routing.output(x, weights.outputs if is_packed else weights.shape[1])
    given = pairs_per_row, factors, biases
    if not is_packed:
        _multiply(output, x, weights, routing, 0, weights.shape[0], *given, invariant=invariant)
    elif invariant or routing.rows <= MAX_PACKED_TILE_ROWS or weights.orders is not None:
        _multiply_packed(output, x, weights, routing, *given, invariant=invariant)
    else:
        _multiply_widened(output, x, weights, routing, *given)
    return output


def _multiply_widened(
    output: torch.Tensor,
    x: torch.Tensor,
    weights: TiledWeight,
    routing: Routing,
    pairs_per_row: int,
    factors: torch.Tensor | None,
    biases: torch.Tensor | None,
) -> None:
    """Widen the experts of one slice after another, to the same memory."""
    outputs, inputs = weights.outputs, weights.inputs
    count = matrices_at_once(weights, x.dtype)
    dense = torch.empty((count * outputs, inputs), dtype=x.dtype, device=x.device)
    for first in range(0, weights.num_matrices, count):
        end = min(first + count, weights.num_matrices)
        own = dense[: (end - first) * outputs]
        widen_lines(own, weights, first * outputs, routing.starts)
        matrices = own.view(-1, outputs, inputs)
        _multiply(output, x, matrices, routing, first, end, pairs_per_row, factors, biases)


def _multiply(
    output: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    routing: Routing,
    first: int,
    end: int,
    pairs_per_row: int,
    factors: torch.Tensor | None,
    biases: torch.Tensor | None,
    *,
    invariant: bool = False,
) -> None:
    """Write the products of experts [first, end), with these experts' dense weights."""
    outputs, inputs = output.shape[1], x.shape[1]
    num_experts = routing.starts.shape[0] - 1
    is_turned = routing.rows <= _FEW_ROWS
    columns, stages = _tile_shape(routing, outputs, x)
    stage_bytes = (routing.rows + columns) * _DEPTH * x.itemsize
    num_tiles, column_tiles = routing.num_tiles, -(-outputs // columns)
    is_slice = end - first < num_experts
    share = -(-num_tiles * (end - first) // num_experts)
    launch(
        _grouped_matmul_kernel,
        (share * column_tiles,) if is_slice else (num_tiles, column_tiles),
        output,
        x,
        weights,
        routing.pairs,
        routing.starts,
        routing.tile_starts,
        factors,
        biases,
        first,
        end,
        outputs,
        inputs,
        weights.stride(0),
        weights.stride(1),
        weights.stride(2),
        IS_SLICE=is_slice,
        PAIRS_PER_ROW=pairs_per_row,
        NUM_EXPERTS=num_experts,
        EXPERTS=power_of_2(num_experts),
        ROWS=routing.rows,
        COLUMNS=columns,
        DEPTH=_DEPTH,
        IS_TURNED=is_turned,
        num_warps=4 if is_turned else 8,
        num_stages=stages_that_fit(x.device, stages, stage_bytes) if x.itemsize == 2 else 2,
        enable_fp_fusion=not invariant,
    )


def _tile_shape(routing: Routing, outputs: int, x: torch.Tensor) -> tuple[int, int]:
    """Return the outputs and stages of a tile of dense weights."""
    if routing.rows <= _FEW_ROWS:
        return _FEW_SHAPE
    is_wide = outputs >= _WIDE_SHAPE[0] and x.dtype.itemsize == 2
    is_wide = is_wide and shared_memory_bytes(x.device) >= WIDE_SHARED_BYTES
    return _WIDE_SHAPE if is_wide else _SHAPE


def _multiply_packed(
    output: torch.Tensor,
    x: torch.Tensor,
    weights: TiledWeight,
    routing: Routing,
    pairs_per_row: int,
    factors: torch.Tensor | None,
    biases: torch.Tensor | None,
    *,
    invariant: bool,
) -> None:
    """Write the products, with weights widened in registers."""
    num_experts, outputs = weights.num_matrices, weights.outputs
    shape = tile_shape(routing.rows, weights, x.dtype, invariant=invariant)
    launch(
        _grouped_packed_kernel,
        (routing.num_tiles, -(-outputs // shape.columns)),
        output,
        x,
        weights.codes,
        weights.scales,
        weights.zeros,
        weights.levels,
        weights.orders,
        weights.factor,
        routing.pairs,
        routing.starts,
        routing.tile_starts,
        factors,
        biases,
        outputs,
        PAIRS_PER_ROW=pairs_per_row,
        NUM_EXPERTS=num_experts,
        EXPERTS=power_of_2(num_experts),
        INPUT_TILES=num_input_tiles(weights),
        SCALES_SUMS=scales_sums(weights, routing.rows, x.dtype, invariant=invariant),
        IS_TURNED=is_turned(shape, x.dtype, invariant=invariant),
        ROWS=routing.rows,
        COLUMNS=shape.columns,
        **kernel_params(weights),
        num_warps=shape.num_warps,
        num_stages=num_stages(shape, weights, x),
        enable_fp_fusion=not invariant,
    )


@triton.jit
def pairs_of_tile(
    tile,
    pairs,
    starts,
    tile_starts,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return a tile's expert, its pairs, and a mask of those that exist.

    Past the last tile none do.
    """
    # The tile's expert is the last one with tiles that begins no later than the tile.
    experts = tl.arange(0, EXPERTS)
    ends = tl.load(tile_starts + 1 + experts, mask=experts < NUM_EXPERTS, other=2**31 - 1)
    expert = tl.minimum(tl.sum((ends <= tile).to(tl.int32), axis=0), NUM_EXPERTS - 1)
    first = tl.load(starts + expert) + (tile - tl.load(tile_starts + expert)) * ROWS
    at = first + tl.arange(0, ROWS)
    is_row = at < tl.load(starts + expert + 1)
    pair = tl.load(pairs + at, mask=is_row, other=0).to(tl.int64)
    return expert.to(tl.int64), pair, is_row


@triton.jit
def _store_pairs(output, acc, pair, is_row, columns, expert, factors, biases, outputs):
    """Store ``(acc + bias) * factor`` for valid pairs: pair [ROWS], columns [COLUMNS].

    With a factor of 0 that is 0, whatever the product is.
    """
    is_column = columns < outputs
    if biases is not None:
        bias = tl.load(biases + expert * outputs + columns, mask=is_column, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if factors is not None:
        factor = tl.load(factors + pair, mask=is_row, other=0.0)[:, None]
        acc = tl.where(factor == 0.0, 0.0, acc * factor)
    place = output + (pair * outputs)[:, None] + columns[None, :]
    is_written = is_row[:, None] & is_column[None, :]
    tl.store(place, acc.to(output.dtype.element_ty), mask=is_written)


@triton.jit(do_not_specialize=["first_expert", "end_expert"])
def _grouped_matmul_kernel(
    output,
    x,
    weights,  # of the first expert and those after it
    pairs,
    starts,
    tile_starts,
    factors,
    biases,
    first_expert,
    end_expert,
    outputs,
    inputs,
    expert_stride,
    output_stride,
    input_stride,
    IS_SLICE: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_TURNED: tl.constexpr,
):
    """One tile of all experts' products with dense weights; or of some experts', who may have more
    than their share of the rows, one after another."""
    wait_for_prior_kernels()
    end = tl.load(tile_starts + end_expert)
    if IS_SLICE:
        first = tl.load(tile_starts + first_expert)
        count = (end - first) * tl.cdiv(outputs, COLUMNS)
        for number in range(tl.program_id(0), count, tl.num_programs(0)):
            _multiply_tile(
                first + number % (end - first),
                number // (end - first),
                *(output, x, weights, pairs, starts, tile_starts, factors, biases),
                *(first_expert, outputs, inputs, expert_stride, output_stride, input_stride),
                *(PAIRS_PER_ROW, NUM_EXPERTS, EXPERTS, ROWS, COLUMNS, DEPTH, IS_TURNED),
            )
    else:
        if tl.program_id(0) >= end:
            return
        _multiply_tile(
            tl.program_id(0),
            tl.program_id(1),
            *(output, x, weights, pairs, starts, tile_starts, factors, biases),
            *(first_expert, outputs, inputs, expert_stride, output_stride, input_stride),
            *(PAIRS_PER_ROW, NUM_EXPERTS, EXPERTS, ROWS, COLUMNS, DEPTH, IS_TURNED),
        )


@triton.jit
def _multiply_tile(
    tile,
    column_tile,
    output,
    x,
    weights,
    pairs,
    starts,
    tile_starts,
    factors,
    biases,
    first_expert,
    outputs,
    inputs,
    expert_stride,
    output_stride,
    input_stride,
    PAIRS_PER_ROW: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_TURNED: tl.constexpr,
):
    """Store what this program's outputs are for a tile of rows."""
    expert, pair, is_row = pairs_of_tile(  # pyright: ignore[reportGeneralTypeIssues]
        tile, pairs, starts, tile_starts, NUM_EXPERTS, EXPERTS, ROWS
    )
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < outputs
    depth = tl.arange(0, DEPTH)
    x_place = x + (pair // PAIRS_PER_ROW * inputs)[:, None] + depth[None, :]
    base = weights + (expert - first_expert) * expert_stride
    weight_place = (
        base + columns.to(tl.int64)[:, None] * output_stride + (depth * input_stride)[None, :]
    )
    if IS_TURNED:
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, inputs, DEPTH):
        is_deep = (depth < inputs - begin)[None, :]
        a = tl.load(x_place + begin, mask=is_row[:, None] & is_deep, other=0.0)
        b = tl.load(
            weight_place + begin * input_stride, mask=is_column[:, None] & is_deep, other=0.0
        )
        if IS_TURNED:
            acc = dot_add(b, tl.trans(a), acc)
        else:
            acc = dot_add(a, tl.trans(b), acc)
    if IS_TURNED:
        acc = tl.trans(acc)
    _store_pairs(output, acc, pair, is_row, columns, expert, factors, biases, outputs)


@triton.jit
def _grouped_packed_kernel(
    output,
    x,
    codes,
    scales,
    zeros,
    levels,
    orders,
    factor,
    pairs,
    starts,
    tile_starts,
    factors,
    biases,
    outputs,
    PAIRS_PER_ROW: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    INPUT_TILES: tl.constexpr,
    SCALES_SUMS: tl.constexpr,
    IS_TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    LIFT: tl.constexpr,
    OFFSET: tl.constexpr,
    CODES_A_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of an expert's rows, with weights in codes."""
    wait_for_prior_kernels()
    tile = tl.program_id(0)
    if tile >= tl.load(tile_starts + NUM_EXPERTS):
        return
    expert, pair, is_row = pairs_of_tile(  # pyright: ignore[reportGeneralTypeIssues]
        tile, pairs, starts, tile_starts, NUM_EXPERTS, EXPERTS, ROWS
    )
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    order = orders
    if orders is not None:
        order = orders + expert * INPUTS
    # Rows without a pair use the first one, which needs no mask.
    x_rows = x + pair // PAIRS_PER_ROW * INPUTS
    lines = expert * outputs + tl.minimum(columns, outputs - 1)
    acc = packed_product(
        x_rows,
        lines,
        codes,
        scales,
        zeros,
        levels,
        order,
        factor,
        0,
        INPUT_TILES,
        INPUT_TILES * 2 * BLOCK == INPUTS,
        SCALES_SUMS,
        IS_TURNED,
        ROWS,
        COLUMNS,
        INPUTS,
        BYTES,
        GROUP,
        GROUPS,
        KIND,
        LIFT,
        OFFSET,
        CODES_A_BYTE,
        BLOCK,
    )
    _store_pairs(output, tl.trans(acc), pair, is_row, columns, expert, factors, biases, outputs)

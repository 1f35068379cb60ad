"""Mixture of experts: two grouped matrix products over rows sorted by expert.

    (token, choice) pairs ─► sorted by expert, each expert's run divided into tiles
                                 │
    x rows gathered ─► x W_gate_up^T ─► activate ─► x W_down^T * weight ─► sum over choices

Tiles are sorted as in MegaBlocks (Gale et al. 2022). The host knows an upper bound of the number of
tiles, the device computes where each tile is, and programs past the last tile exit at once. Nothing
waits for the routing, and a captured graph serves any routing.

A step of few tokens does not sort: each pair is a row of a product of few rows (``skinny.py``),
which fuses the norm before it and the gate after it; the sum is added to the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kernels.moe import ExpertMatrices, ExpertTensors, GatedActivation, RouterWeights, RoutingRule
from kernels.skinny import GateKind, RowNorm, fused_gate_kind
from kernels.tiled import TiledWeight
from kernels.triton.launch import (
    launch,
    power_of_2,
    shared_memory_bytes,
    wait_for_prior_kernels,
)
from kernels.triton.layers import silu_mul
from kernels.triton.matmul import WIDE_SHARED_BYTES
from kernels.triton.packed_tiles import kernel_params, packed_product, scales_sums
from kernels.triton.quantised import num_input_tiles, num_stages, tile_shape
from kernels.triton.routing import Routing, select_experts, sort_pairs
from kernels.triton.skinny import skinny_linear
from kernels.triton.skinny_packed import skinny_packed_linear
from kernels.triton.sums import sum_parts
from kernels.triton.tiles import dot_add

_DEPTH = 64
# Outputs and stages of a tile. With few rows, outputs and rows swap roles in the instruction, as in
# ``matmul.py``, so that a row's result has the same bits for any height and width of a tile.
_FEW_ROWS, _FEW_SHAPE, _SHAPE, _WIDE_SHAPE = 64, (64, 8), (128, 4), (256, 3)


def fused_moe(
    x: torch.Tensor,
    experts: ExpertTensors,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
    apply_router_weight_on_input: bool = False,
    some_elsewhere: bool = False,
) -> torch.Tensor:
    """See ``kernels.reference.moe.fused_moe``; all contiguous."""
    routing = sort_pairs(expert_ids, experts.num_experts, has_remote_pairs=some_elsewhere)
    first = apply_router_weight_on_input
    return _run_experts(x, experts, routing, expert_weights, activate, weight_inputs=first)


def invariant_moe(
    x: torch.Tensor,
    experts: ExpertTensors,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
    apply_router_weight_on_input: bool = False,
    some_elsewhere: bool = False,
) -> torch.Tensor:
    """``fused_moe`` whose results for a token have the same bits in any batch.

    With dense weights ``fused_moe`` has this property anyway; with codes products must not be fused
    with sums.
    """
    routing = sort_pairs(expert_ids, experts.num_experts, has_remote_pairs=some_elsewhere)
    first = apply_router_weight_on_input
    return _run_experts(
        x, experts, routing, expert_weights, activate, weight_inputs=first, fuses=False
    )


def _run_experts(
    x: torch.Tensor,
    experts: ExpertTensors,
    routing: Routing,
    expert_weights: torch.Tensor,
    activate: Callable[[torch.Tensor], torch.Tensor] | None,
    *,
    weight_inputs: bool,
    fuses: bool = True,
) -> torch.Tensor:
    num_tokens, top_k = expert_weights.shape
    gate_up, down, gate_up_bias, down_bias = experts
    # Without a bias, an expert's input can be weighted after its first product.
    before, after = (expert_weights, None) if weight_inputs else (None, expert_weights)
    projected = grouped_matmul(x, gate_up, routing, top_k, before, gate_up_bias, fuses=fuses)
    inner = (activate or silu_mul)(projected)
    expanded = grouped_matmul(inner, down, routing, 1, after, down_bias, fuses=fuses)
    out = torch.empty((num_tokens, expanded.shape[1]), dtype=x.dtype, device=x.device)
    return sum_parts(expanded, out)


def add_experts(
    stream: torch.Tensor,
    norm: RowNorm,
    router: RouterWeights,
    rule: RoutingRule,
    experts: ExpertTensors,
    gating: GatedActivation,
) -> None:
    """See ``kernels.reference.moe.add_experts``; five launches, and one more for a gate that is
    not built in."""
    said = skinny_linear(stream, *router[:2], norm=norm, dtype=router.weight.dtype)
    ids, shares = select_experts(said, router.correction, rule, experts.num_experts)
    gate = fused_gate_kind(gating)
    inner = _skinny_experts(
        stream, experts.gate_up, experts.gate_up_bias, ids, norm=norm, gate=gate
    )
    if gate is None:
        inner = gating(inner)
    made = _skinny_experts(inner, experts.down, experts.down_bias, ids.view(-1, 1))
    sum_parts(made, stream, shares, adds=True)


def _skinny_experts(
    x: torch.Tensor,
    weights: ExpertMatrices,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    *,
    norm: RowNorm | None = None,
    gate: GateKind | None = None,
) -> torch.Tensor:
    """Compute the products of few tokens' experts, pair by pair."""
    if isinstance(weights, TiledWeight):
        return skinny_packed_linear(x, weights, bias, norm=norm, gate=gate, experts=ids)
    return skinny_linear(x, weights, bias, norm=norm, gate=gate, experts=ids)


def grouped_matmul(
    x: torch.Tensor,
    weights: ExpertMatrices,
    routing: Routing,
    pairs_per_row: int,
    factors: torch.Tensor | None,
    biases: torch.Tensor | None = None,
    *,
    fuses: bool = True,
) -> torch.Tensor:
    """``(x[pair // pairs_a_row] @ weights[expert]^T + bias) * factor``: [pairs, outputs], by pair.

    Args:
        x: [rows, inputs].
        weights: [experts, outputs, inputs], with any strides, or in codes.
        routing: the assignment of pairs to experts.
        pairs_per_row: pairs that share a row of x.
        factors: one per pair, float32, or None.
        biases: [experts, outputs] contiguous, or None.
        fuses: the compiler may fuse a product with the following sum, without rounding between.
    """
    if isinstance(weights, TiledWeight):
        return _grouped_packed(x, weights, routing, pairs_per_row, factors, biases, fuses=fuses)
    num_experts, outputs, inputs = weights.shape
    output = routing.output(x, outputs)
    is_turned = routing.rows <= _FEW_ROWS
    columns, stages = _tile_shape(routing, outputs, x)
    launch(
        _grouped_matmul_kernel,
        (routing.num_tiles, -(-outputs // columns)),
        output,
        x,
        weights,
        routing.pairs,
        routing.starts,
        routing.tile_starts,
        factors,
        biases,
        outputs,
        inputs,
        weights.stride(0),
        weights.stride(1),
        weights.stride(2),
        PAIRS_A_ROW=pairs_per_row,
        NUM_EXPERTS=num_experts,
        EXPERTS=power_of_2(num_experts),
        ROWS=routing.rows,
        COLUMNS=columns,
        DEPTH=_DEPTH,
        IS_TURNED=is_turned,
        num_warps=4 if is_turned else 8,
        num_stages=stages if x.dtype.itemsize == 2 else 2,
        enable_fp_fusion=fuses,
    )
    return output


def _tile_shape(routing: Routing, outputs: int, x: torch.Tensor) -> tuple[int, int]:
    """Return the outputs and stages of a tile of dense weights."""
    if routing.rows <= _FEW_ROWS:
        return _FEW_SHAPE
    is_wide = outputs >= _WIDE_SHAPE[0] and x.dtype.itemsize == 2
    is_wide = is_wide and shared_memory_bytes(x.device) >= WIDE_SHARED_BYTES
    return _WIDE_SHAPE if is_wide else _SHAPE


def _grouped_packed(
    x: torch.Tensor,
    weights: TiledWeight,
    routing: Routing,
    pairs_a_row: int,
    factors: torch.Tensor | None,
    biases: torch.Tensor | None,
    *,
    fuses: bool,
) -> torch.Tensor:
    num_experts, outputs = weights.num_matrices, weights.outputs
    output = routing.output(x, outputs)
    shape = tile_shape(routing.rows)
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
        PAIRS_A_ROW=pairs_a_row,
        NUM_EXPERTS=num_experts,
        EXPERTS=power_of_2(num_experts),
        INPUT_TILES=num_input_tiles(weights),
        SCALES_SUMS=scales_sums(weights, routing.rows, x.dtype, invariant=not fuses),
        ROWS=routing.rows,
        COLUMNS=shape.columns,
        **kernel_params(weights),
        num_warps=shape.num_warps,
        num_stages=num_stages(shape, weights, x),
        enable_fp_fusion=fuses,
    )
    return output


@triton.jit
def _rows_of_tile(
    pairs,
    starts,
    tile_starts,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return the expert of this program's tile, its pairs, and a mask of those that exist."""
    tile = tl.program_id(0)
    # The tile's expert is the last one with tiles that begins no later than the tile.
    experts = tl.arange(0, EXPERTS)
    ends = tl.load(tile_starts + 1 + experts, mask=experts < NUM_EXPERTS, other=2**31 - 1)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    first = tl.load(starts + expert) + (tile - tl.load(tile_starts + expert)) * ROWS
    at = first + tl.arange(0, ROWS)
    is_row = at < tl.load(starts + expert + 1)
    pair = tl.load(pairs + at, mask=is_row, other=0).to(tl.int64)
    return expert.to(tl.int64), pair, is_row


@triton.jit
def _store_pairs(output, acc, pair, is_row, columns, expert, factors, biases, outputs):
    """Store ``(acc + bias) * factor`` for valid pairs: pair [ROWS], columns [COLUMNS]."""
    is_column = columns < outputs
    if biases is not None:
        bias = tl.load(biases + expert * outputs + columns, mask=is_column, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if factors is not None:
        acc *= tl.load(factors + pair, mask=is_row, other=0.0)[:, None]
    place = output + (pair * outputs)[:, None] + columns[None, :]
    is_written = is_row[:, None] & is_column[None, :]
    tl.store(place, acc.to(output.dtype.element_ty), mask=is_written)


@triton.jit
def _grouped_matmul_kernel(
    output,
    x,
    weights,
    pairs,
    starts,
    tile_starts,
    factors,
    biases,
    outputs,
    inputs,
    expert_stride,
    output_stride,
    input_stride,
    PAIRS_A_ROW: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_TURNED: tl.constexpr,
):
    """One tile of an expert's rows, with dense weights."""
    wait_for_prior_kernels()
    if tl.program_id(0) >= tl.load(tile_starts + NUM_EXPERTS):
        return
    expert, pair, is_row = _rows_of_tile(  # pyright: ignore[reportGeneralTypeIssues]
        pairs, starts, tile_starts, NUM_EXPERTS, EXPERTS, ROWS
    )
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < outputs
    depth = tl.arange(0, DEPTH)
    x_place = x + (pair // PAIRS_A_ROW * inputs)[:, None] + depth[None, :]
    base = weights + expert * expert_stride
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
    PAIRS_A_ROW: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    INPUT_TILES: tl.constexpr,
    SCALES_SUMS: tl.constexpr,
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
    if tl.program_id(0) >= tl.load(tile_starts + NUM_EXPERTS):
        return
    expert, pair, is_row = _rows_of_tile(  # pyright: ignore[reportGeneralTypeIssues]
        pairs, starts, tile_starts, NUM_EXPERTS, EXPERTS, ROWS
    )
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    order = orders
    if orders is not None:
        order = orders + expert * INPUTS
    # Rows without a pair use the first one, which needs no mask.
    x_rows = x + pair // PAIRS_A_ROW * INPUTS
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

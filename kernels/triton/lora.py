"""LoRA adapters of a batch: two products of each token with the matrices of its adapter.

    x ─► shrink: down, [rank, inputs] ─► inner ─► expand: up, [rank, outputs] ─► added to the output

As in Punica (Chen et al. 2023), the tokens are sorted by adapter, and a tile has adjacent tokens of
one adapter. A decode step has few tiles with few results. They leave most multiprocessors idle,
each waits for thousands of inputs, and two more kernels in every layer cost more than their bytes.
Therefore

- the inputs of few tokens are cut into groups, each summed by a program of its own. ``expand`` adds
  up the groups. For many tokens one program sums all groups of a tile, in the same order, so that a
  token has the same bits in any batch;
- both kernels request their matrices before they wait for their turn (``launch.py``);
- ``expand`` adds to the layer's output itself.

Tokens without an adapter are in no tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.lora import AdapterRows, AdapterWeights
from kernels.triton.grouped import pairs_of_tile
from kernels.triton.launch import (
    dot_width,
    launch,
    power_of_2,
    prefetch,
    stages_that_fit,
    wait_for_prior_kernels,
)
from kernels.triton.routing import Routing, sort_pairs
from kernels.triton.tiles import complete, dot_add

_GROUP = 512  # inputs that are summed together
_MAX_CUT_TOKENS = 512  # with more, ``expand`` would read each group's sums too often
_DEPTH = 64
_RANKS = 64  # of a tile
_GROUPS_AT_ONCE = 8
_LINE: tl.constexpr = tl.constexpr(128)  # bytes that are requested at once


class _Shape(NamedTuple):
    """Of the tiles of both products."""

    columns: int  # of ``expand``
    num_warps: int
    num_stages: int


# With few rows, outputs and rows swap roles in the instruction, as in ``matmul.py``.
_FEW_ROWS, _FEW, _MANY = 64, _Shape(64, 4, 8), _Shape(128, 8, 4)


def plan_adapters(rows: AdapterRows, num_slots: int) -> AdapterRows:
    """See ``kernels.reference.lora.plan_adapters``: the tokens by slot, on the device."""
    is_without = rows.slots < 0
    routing = sort_pairs(rows.slots.masked_fill(is_without, num_slots).unsqueeze(1), num_slots)
    # A library's operation waits for all of the sort, so that later kernels may read what it has
    # found before they wait for their turns. Nobody reads its own result, which might not be there.
    routing.starts.clone()
    return rows._replace(plan=routing)


def add_adapters(
    out: torch.Tensor, x: torch.Tensor, weights: AdapterWeights, rows: AdapterRows
) -> torch.Tensor:
    """See ``kernels.reference.lora.add_adapters``."""
    if rows.plan is None:
        rows = plan_adapters(rows, weights.down.shape[0])
    inner = _shrink(x, weights.down, rows.plan)
    _expand(out, inner, weights.up, rows.plan)
    return out


def _shrink(x: torch.Tensor, down: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the sums of the groups of inputs, or of all: [groups, n, rank] float32."""
    num_slots, rank, inputs = down.shape
    num_tokens = x.shape[0]
    groups = -(-inputs // _GROUP) if num_tokens <= _MAX_CUT_TOKENS else 1
    inner = torch.empty((groups, num_tokens, rank), dtype=torch.float32, device=x.device)
    shape = _FEW if routing.rows <= _FEW_ROWS else _MANY
    stage_bytes = (routing.rows + _RANKS) * _DEPTH * x.itemsize
    launch(
        _shrink_kernel,
        (routing.num_tiles, groups, -(-rank // _RANKS)),
        inner,
        x,
        down,
        routing.pairs,
        routing.starts,
        routing.tile_starts,
        num_tokens,
        rank,
        inputs,
        NUM_SLOTS=num_slots,
        SLOTS=power_of_2(num_slots),
        IS_CUT=groups > 1,
        GROUP=_GROUP,
        ROWS=routing.rows,
        RANKS=_RANKS,
        DEPTH=_DEPTH,
        IS_TURNED=routing.rows <= _FEW_ROWS,
        num_warps=shape.num_warps,
        num_stages=stages_that_fit(x.device, shape.num_stages, stage_bytes),
    )
    return inner


def _expand(out: torch.Tensor, inner: torch.Tensor, up: torch.Tensor, routing: Routing) -> None:
    """Add the products of the groups' sums to ``out`` [n, outputs]."""
    num_slots, rank, outputs = up.shape
    shape = _FEW if routing.rows <= _FEW_ROWS else _MANY
    launch(
        _expand_kernel,
        (routing.num_tiles, -(-outputs // shape.columns)),
        out,
        inner,
        up,
        routing.pairs,
        routing.starts,
        routing.tile_starts,
        inner.shape[1],
        rank,
        outputs,
        NUM_SLOTS=num_slots,
        SLOTS=power_of_2(num_slots),
        GROUPS=inner.shape[0],
        GROUPS_AT_ONCE=min(_GROUPS_AT_ONCE, power_of_2(inner.shape[0])),
        ROWS=routing.rows,
        COLUMNS=shape.columns,
        RANKS=min(_RANKS, dot_width(rank)),
        IS_TURNED=routing.rows <= _FEW_ROWS,
        num_warps=shape.num_warps,
        num_stages=1,  # there is hardly ever a second tile of ranks
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    inner,  # [groups, num_tokens, rank]
    x,
    down,
    pairs,
    starts,
    tile_starts,
    num_tokens,
    rank,
    inputs,
    NUM_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr,
    IS_CUT: tl.constexpr,  # into groups, or one program sums all
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_TURNED: tl.constexpr,
):
    """Some ranks of a tile of tokens, for one group of inputs or for all of them."""
    slot, token, is_token = pairs_of_tile(  # pyright: ignore[reportGeneralTypeIssues]
        tl.program_id(0), pairs, starts, tile_starts, NUM_SLOTS, SLOTS, ROWS
    )
    ranks = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    group = tl.program_id(1)
    first = group * GROUP
    count = inputs
    if IS_CUT:
        count = GROUP  # with one that is not constant the assembler makes products wait
    depth = tl.arange(0, DEPTH)
    # Past the end the last rank is repeated, which needs no mask.
    lines = slot * rank + tl.minimum(ranks, rank - 1)
    weight_place = down + (lines * inputs + first)[:, None] + depth[None, :]
    STEP: tl.constexpr = _LINE // (down.dtype.element_ty.primitive_bitwidth // 8)
    ahead = first + tl.arange(0, GROUP // STEP) * STEP
    prefetch(down + (lines * inputs)[:, None] + tl.minimum(ahead, inputs - 1)[None, :])
    wait_for_prior_kernels()

    x_place = x + (token * inputs + first)[:, None] + depth[None, :]
    if IS_TURNED:
        part = tl.zeros([RANKS, ROWS], tl.float32)
    else:
        part = tl.zeros([ROWS, RANKS], tl.float32)
    if not IS_CUT:
        total = tl.zeros_like(part)
    for begin in range(0, count, DEPTH):
        is_deep = (depth < inputs - first - begin)[None, :]
        a = tl.load(x_place + begin, mask=is_token[:, None] & is_deep, other=0.0)
        b = tl.load(weight_place + begin, mask=is_deep, other=0.0)
        if IS_TURNED:
            part = dot_add(b, tl.trans(a), part)
        else:
            part = dot_add(a, tl.trans(b), part)
        if not IS_CUT:
            # Not chosen by a condition, which Triton's compiler for a B200 stumbles over.
            ended = tl.where((begin + DEPTH) % GROUP == 0, 1.0, 0.0)
            total += part * ended
            part *= 1.0 - ended
    if not IS_CUT:
        part += total
    if IS_TURNED:
        part = tl.trans(part)
    row = group.to(tl.int64) * num_tokens + token
    place = inner + (row * rank)[:, None] + ranks[None, :]
    tl.store(place, part, mask=is_token[:, None] & (ranks < rank)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    out,
    inner,
    up,
    pairs,
    starts,
    tile_starts,
    num_tokens,
    rank,
    outputs,
    NUM_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    IS_TURNED: tl.constexpr,
):
    """Some outputs of a tile of tokens."""
    slot, token, is_token = pairs_of_tile(  # pyright: ignore[reportGeneralTypeIssues]
        tl.program_id(0), pairs, starts, tile_starts, NUM_SLOTS, SLOTS, ROWS
    )
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < outputs
    ranks = tl.arange(0, RANKS)
    STEP: tl.constexpr = _LINE // (up.dtype.element_ty.primitive_bitwidth // 8)
    ahead = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS // STEP) * STEP
    first_lines = (slot * rank + tl.minimum(ranks, rank - 1)) * outputs
    prefetch(up + first_lines[:, None] + tl.minimum(ahead, outputs - 1)[None, :])
    wait_for_prior_kernels()

    place = out + (token * outputs)[:, None] + columns[None, :]
    is_made = is_token[:, None] & is_column[None, :]
    before = tl.load(place, mask=is_made, other=0.0)
    if IS_TURNED:
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, rank, RANKS):
        is_rank = ranks < rank - begin
        own = inner + (token * rank)[:, None] + (begin + ranks)[None, :]
        total = tl.zeros([ROWS, RANKS], tl.float32)
        is_read = is_token[:, None] & is_rank[None, :]
        for base in range(0, GROUPS, GROUPS_AT_ONCE):
            # Not one after another: their loads are all in flight together.
            for nth in tl.static_range(GROUPS_AT_ONCE):  # pyright: ignore[reportGeneralTypeIssues]
                group = base + nth
                far = own + group * num_tokens * rank
                total += tl.load(far, mask=is_read & (group < GROUPS), other=0.0)
        a = total.to(up.dtype.element_ty)
        lines = (slot * rank + begin + ranks) * outputs
        b = tl.load(
            up + lines[:, None] + columns[None, :],
            mask=is_rank[:, None] & is_column[None, :],
            other=0.0,
        )
        # ``a`` may be multiplied from registers, which the next turn's must not overwrite.
        if IS_TURNED:
            acc = complete(dot_add(tl.trans(b), tl.trans(a), acc))
        else:
            acc = complete(dot_add(a, b, acc))
    if IS_TURNED:
        acc = tl.trans(acc)
    tl.store(place, (before.to(tl.float32) + acc).to(out.dtype.element_ty), mask=is_made)

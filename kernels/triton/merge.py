"""Merge the parts of rows that were cut: into splits of a fixed size, or where shares end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention import LayerAttention
from kernels.triton.launch import launch, power_of_2, wait_for_prior_kernels
from kernels.triton.plan import AttentionPlan, WorkList
from kernels.triton.tiles import LOG2_E

_MERGE_TILE = 16


def merge_splits(
    plan: AttentionPlan,
    splits: WorkList,
    layer: LayerAttention,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Merge rows with several splits, [num_tokens, num_heads, head_dim].

    The inputs are means [capacity, num_heads, head_dim] and the logarithms of their weights, both
    float32.
    """
    num_heads, head_dim = output.shape[1:]
    launch(
        _merge_kernel,
        (plan.geometry.seq_lens.shape[0], num_heads),
        output,
        partial,
        partial_lse,
        plan.geometry.query_start,
        splits.starts,
        layer.sinks,
        HEAD_DIM=head_dim,
        DIM=power_of_2(head_dim),
        TILE=_MERGE_TILE,
        num_warps=4,
    )


@triton.jit(do_not_specialize_on_alignment=["query_start", "split_starts"])
def _merge_kernel(
    output,
    partial,
    partial_lse,
    query_start,
    split_starts,
    sinks,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Merge one head of one row: the weighted mean of its splits, if there are several."""
    wait_for_prior_kernels()
    row, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    begin, end = tl.load(split_starts + row), tl.load(split_starts + row + 1)
    if end - begin <= 1:
        return
    dims = tl.arange(0, DIM)
    top = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([DIM], tl.float32)
    for first in range(begin, end, TILE):
        splits = first + tl.arange(0, TILE).to(tl.int64)
        is_used = splits < end
        places = splits * num_heads + head
        lse = tl.load(partial_lse + places, mask=is_used, other=-float("inf"))
        means = tl.load(
            partial + places[:, None] * HEAD_DIM + dims[None, :],
            mask=is_used[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        weights = tl.exp2(lse - new_top)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=0)
        acc = acc * shrink + tl.sum(means * weights[:, None], axis=0)
        top = new_top
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head) * LOG2_E - top)
    mean = acc / total
    token = tl.load(query_start + row).to(tl.int64)
    place = output + (token * num_heads + head) * HEAD_DIM + dims
    tl.store(place, mean.to(output.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def merge_parts(
    target,  # of the row
    parts,
    part_lse,
    sinks,
    first_slot,
    starts_inside,  # 1: the first part is not at the beginning of its program's share
    num_parts,
    kv_head,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,  # at once
):
    """Store the weighted mean of a row's parts, which adjacent programs of ``decode.py`` have
    left."""
    group, dims = tl.arange(0, HEADS), tl.arange(0, DIM)
    in_group = group < GROUP
    top = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, DIM], tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)
        slot = first_slot + tl.where(part == 0, starts_inside, 2 * part)
        places = slot[:, None] * GROUP + group[None, :]
        is_part = (part < num_parts)[:, None] & in_group[None, :]
        in_part = is_part[:, :, None] & (dims < HEAD_DIM)[None, None, :]
        # Other programs have written these: not from this multiprocessor's own cache.
        lse = tl.load(part_lse + places, mask=is_part, other=-float("inf"), cache_modifier=".cg")
        mean = tl.load(
            parts + places[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=in_part,
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        base = tl.where(in_group, new_top, 0.0)
        weight, shrink = tl.exp2(lse - base[None, :]), tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink[:, None] + tl.sum(mean * weight[:, :, None], axis=0)
        top = new_top
    heads = kv_head * GROUP + group
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + heads, mask=in_group, other=0.0) * LOG2_E - top)
    # Heads past the group have no weight at all.
    mean = acc / tl.where(in_group, total, 1.0)[:, None]
    place = target + heads[:, None] * HEAD_DIM + dims[None, :]
    in_head = in_group[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(place, mean.to(target.dtype.element_ty), mask=in_head)

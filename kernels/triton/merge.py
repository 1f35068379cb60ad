"""Merge the parts of rows that were cut: into splits of a fixed size, or where shares end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention import LayerAttention
from kernels.triton.launch import launch, power_of_2, wait_for_prior_kernels
from kernels.triton.tiles import LOG2_E
from kernels.triton.work import AttentionPlan, WorkList

_MERGE_TILE = 16
_THREADS: tl.constexpr = tl.constexpr(128)  # of a program of decode.py
_MOST_PARTS = 8
_PART_NUMBERS = 4096  # of the parts that one program merges at once; as many are in flight


def parts_at_once(group: int, dim: int) -> int:
    """Return how many parts of a row ``finish_part`` merges at once."""
    return max(1, min(_MOST_PARTS, _PART_NUMBERS // (power_of_2(group) * dim)))


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
def finish_part(
    target,  # of the row's output
    parts,  # [2 * programs, GROUP, HEAD_DIM] float32, softmax-weighted means
    part_lse,  # [2 * programs, GROUP] float32, log2 of a part's sum of 2^score
    arrivals,  # [rows, NUM_KV_HEADS], 0 before and after
    sinks,
    mean,  # [rows of heads, DIM]
    lse,
    part,  # number of it
    first,  # part of the head
    num_parts,  # of the head
    starts_inside,
    row,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Store what a program has of a row: the result, or a part of it.

    The program that leaves a row's last part merges all of them. A program has two parts at most,
    whose numbers are twice its own, and one more. Of a head, all are their program's first, but for
    the first one if it ``starts_inside`` (0 or 1).
    """
    group, dims = tl.arange(0, mean.shape[0]), tl.arange(0, DIM)
    in_group = group < GROUP
    heads = kv_head * GROUP + group
    in_head = in_group[:, None] & (dims < HEAD_DIM)[None, :]
    if num_parts == 1:
        if sinks is not None:
            sink = tl.load(sinks + heads, mask=in_group, other=0.0) * LOG2_E
            mean = mean / (1.0 + tl.exp2(sink - lse))[:, None]
        place = target + heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(place, mean.to(target.dtype.element_ty), mask=in_head)
    else:
        own = parts + part * GROUP * HEAD_DIM
        tl.store(own + group[:, None] * HEAD_DIM + dims[None, :], mean, mask=in_head)
        tl.store(part_lse + part * GROUP + group, lse, mask=in_group)
        counter = arrivals + row * NUM_KV_HEADS + kv_head
        # All threads' stores come before the atomic operation, which one of them does.
        tl.debug_barrier()
        num_before = tl.atomic_add(counter, 1, sem="acq_rel")
        if num_before == num_parts - 1:
            tl.store(counter, 0)
            _merge_parts(
                *(target, parts, part_lse, sinks, first, starts_inside, num_parts, kv_head),
                *(GROUP, HEADS, HEAD_DIM, DIM, PARTS),
            )


@triton.jit
def _merge_parts(
    target,
    parts,
    part_lse,
    sinks,
    first,
    starts_inside,
    num_parts,
    kv_head,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,  # at once
):
    """Store the weighted mean of a row's parts, which adjacent programs have left.

    Each part is a tensor of its own: a thread has the same numbers of all of them, and adds them up
    alone. One tensor of all parts would be summed across threads, through shared memory. Numbers
    are [heads, dims / RUN, RUN], and their weights [heads, dims / RUN], one for a thread's run.
    """
    RUN: tl.constexpr = max(1, min(4, HEADS * DIM // _THREADS))  # pyright: ignore[reportAssignmentType]
    group, runs = tl.arange(0, HEADS), tl.arange(0, DIM // RUN)
    dims = (runs * RUN)[None, :, None] + tl.arange(0, RUN)[None, None, :]
    in_group = group < GROUP
    in_run = in_group[:, None] & (runs * RUN < HEAD_DIM)[None, :]
    in_head = in_group[:, None, None] & (dims < HEAD_DIM)
    STRIDE: tl.constexpr = 2 * GROUP  # programs leave two parts each, and these are the first ones
    lines = first * GROUP + group
    lse_place = part_lse + lines[:, None] + runs[None, :] * 0
    mean_place = parts + lines[:, None, None] * HEAD_DIM + dims
    top = tl.full([HEADS, DIM // RUN], -float("inf"), tl.float32)
    total = tl.zeros([HEADS, DIM // RUN], tl.float32)
    acc = tl.zeros([HEADS, DIM // RUN, RUN], tl.float32)
    # The row's first part may be the second of its program.
    moved = starts_inside * GROUP
    all_lse, all_means = _load_parts(
        lse_place, mean_place, moved, num_parts, in_run, in_head, STRIDE, HEAD_DIM, PARTS
    )
    for begin in range(0, num_parts, PARTS):
        lse_place += PARTS * STRIDE
        mean_place += PARTS * STRIDE * HEAD_DIM
        following = num_parts - begin - PARTS
        next_lse, next_means = _load_parts(
            lse_place, mean_place, 0, following, in_run, in_head, STRIDE, HEAD_DIM, PARTS
        )
        new_top = top
        for i in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
            new_top = tl.maximum(new_top, all_lse[i])
        base = tl.where(new_top == -float("inf"), 0.0, new_top)  # a head past the group
        shrink = tl.exp2(top - base)
        total, acc = total * shrink, acc * shrink[:, :, None]
        for i in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
            weight = tl.exp2(all_lse[i] - base)
            total += weight
            acc += all_means[i] * weight[:, :, None]
        top, all_lse, all_means = new_top, next_lse, next_means
    heads = kv_head * GROUP + group
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=in_group, other=0.0)[:, None] * LOG2_E
        total += tl.exp2(sink - top)
    # What is past the group or the head has no weight at all.
    mean = acc / tl.where(total > 0.0, total, 1.0)[:, :, None]
    place = target + heads[:, None, None] * HEAD_DIM + dims
    tl.store(place, mean.to(target.dtype.element_ty), mask=in_head)


@triton.jit
def _load_parts(
    lse_place,
    mean_place,
    moved,  # the first one, by so many lines
    num_parts,
    in_run,
    in_head,
    STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return the first ``PARTS`` of the parts, as tuples of log2 of their weights, and means."""
    all_lse, all_means = (), ()
    for i in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        at = i * STRIDE
        if i == 0:
            at += moved
        # Other programs have written these: not from this multiprocessor's own cache.
        is_read = in_run & (i < num_parts)
        lse = tl.load(lse_place + at, mask=is_read, other=-float("inf"), cache_modifier=".cg")
        is_read, place = in_head & (i < num_parts), mean_place + at * HEAD_DIM
        all_lse += (lse,)
        all_means += (tl.load(place, mask=is_read, other=0.0, cache_modifier=".cg"),)
    return all_lse, all_means

"""Assign experts to tokens, and tokens to experts: two launches a layer.

    router's logits ─► scores ─► top k ─► (token, choice) pairs ─► by expert, divided into tiles

A decode step does this in every layer for few tokens, and each launch costs more than its
arithmetic. So one program of the first kernel makes all of a token's choices, and one program of
the second counts all pairs for itself and lists those of its expert: none waits for another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from kernels.moe import MIN_WEIGHT_SUM, RoutingRule
from kernels.skinny import MAX_SKINNY_ROWS
from kernels.triton.launch import launch, power_of_2, wait_for_prior_kernels
from kernels.triton.matmul import invariant_linear
from kernels.triton.skinny import skinny_linear

_TILE_ROWS = (16, 32, 64, 128)  # rows of a tile; each height is a separate kernel
_CHUNKS = 1024, 4096  # pairs per iteration, for few and for many


class Routing(NamedTuple):
    """(token, choice) pairs, numbered ``token * top_k + choice``, sorted by expert."""

    pairs: torch.Tensor  # [n * top_k] int32, sorted by expert, then by number
    starts: torch.Tensor  # [experts + 1] int32, first of each expert's pairs
    tile_starts: torch.Tensor  # [experts + 1] int32, first of each expert's tiles
    num_tiles: int  # an upper bound
    rows: int  # per tile
    has_remote_pairs: bool  # pairs from the last start on are in no tile

    def output(self, x: torch.Tensor, outputs: int) -> torch.Tensor:
        """Allocate the pairs' results, zeroed if some pairs are not computed."""
        make = torch.zeros if self.has_remote_pairs else torch.empty
        return make((self.pairs.shape[0], outputs), dtype=x.dtype, device=x.device)


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    rule: RoutingRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.reference.moe``; all contiguous. A token's experts are in descending order of
    score.

    If the scores are nan, its experts and weights are arbitrary.
    """
    if x.shape[0] <= MAX_SKINNY_ROWS:
        said = skinny_linear(x, weight, bias, dtype=weight.dtype)
    else:
        said = functional.linear(x.to(weight.dtype), weight, bias)
    return select_experts(said, correction, rule, weight.shape[0])


def invariant_route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    rule: RoutingRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``route`` with the same bits in any batch."""
    said = invariant_linear(x.to(weight.dtype), weight, bias)
    return select_experts(said, correction, rule, weight.shape[0])


def select_experts(
    said: torch.Tensor, correction: torch.Tensor | None, rule: RoutingRule, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by the router's outputs, [n, experts]."""
    shape, device = (said.shape[0], rule.top_k), said.device
    ids = torch.empty(shape, dtype=torch.int64, device=device)
    shares = torch.empty(shape, dtype=torch.float32, device=device)
    launch(
        _choose_kernel,
        (said.shape[0],),
        ids,
        shares,
        said,
        correction,
        rule.scale,
        rule.margin,
        NUM_EXPERTS=num_experts,
        EXPERTS=power_of_2(num_experts),
        TOP_K=rule.top_k,
        CHOICES=power_of_2(rule.top_k),
        IS_SOFTMAX=rule.scoring == "softmax",
        IS_SPARSE_MIXER=rule.scoring == "sparse_mixer",
        IS_LATE=rule.scoring == "late_sigmoid",
        NORMALISED=rule.normalised,
        NUM_GROUPS=rule.num_groups,
        TOP_GROUPS=rule.top_groups,
        GROUP_BEST=rule.group_best,
        LEAST_SUM=MIN_WEIGHT_SUM,
        num_warps=1,
    )
    return ids, shares


def moe_token_thresholds(num_experts: int, top_k: int) -> tuple[int, ...]:
    """See ``kernels.reference.moe.moe_token_thresholds``."""
    fewest = (height // 2 + 1 for height in _TILE_ROWS[1:])  # rows of an expert, on average
    return (1, *(-(-rows * num_experts // top_k) for rows in fewest))


def sort_pairs(
    expert_ids: torch.Tensor,
    num_experts: int,
    *,
    has_remote_pairs: bool = False,
) -> Routing:
    """List the pairs of each expert.

    ``expert_ids`` [n, top_k] are integers up to ``num_experts``, which itself stands for no expert
    here.
    """
    expert_ids, num_pairs, device = expert_ids.contiguous(), expert_ids.numel(), expert_ids.device
    # Small tiles if experts have few rows: a tile reads all of its expert's weights.
    rows = max(_TILE_ROWS[0], power_of_2(num_pairs // num_experts))
    rows = min(_TILE_ROWS[-1], rows)
    num_tiles = min(num_pairs, num_pairs // rows + num_experts)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=device)
    starts, tile_starts = (
        torch.empty(num_experts + 1, dtype=torch.int32, device=device) for _ in range(2)
    )
    launch(
        _sort_kernel,
        (num_experts,),
        pairs,
        starts,
        tile_starts,
        expert_ids,
        num_pairs,
        NUM_EXPERTS=num_experts,
        BINS=power_of_2(num_experts + 1),
        ROWS=rows,
        CHUNK=_CHUNKS[rows > _TILE_ROWS[0]],
        num_warps=4,
    )
    return Routing(pairs, starts, tile_starts, num_tiles, rows, has_remote_pairs)


@triton.jit
def _choose_kernel(
    ids,
    shares,
    said,
    correction,
    scale,
    margin,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    IS_SPARSE_MIXER: tl.constexpr,
    IS_LATE: tl.constexpr,
    NORMALISED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    LEAST_SUM: tl.constexpr,
):
    """The experts of one token."""
    wait_for_prior_kernels()
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < NUM_EXPERTS
    place = said + token * NUM_EXPERTS + experts
    logits = tl.load(place, mask=is_expert, other=-float("inf")).to(tl.float32)
    if IS_SPARSE_MIXER or IS_LATE:
        scores = tl.where(is_expert, logits, 0.0)
    elif IS_SOFTMAX:
        scores = tl.exp(logits - tl.max(logits, axis=0))
        scores /= tl.sum(scores, axis=0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    rest = scores
    if correction is not None:
        rest += tl.load(correction + experts, mask=is_expert, other=0.0)
    rest = tl.where(is_expert, rest, -float("inf"))
    if NUM_GROUPS > 1:
        rest = _in_best_groups(
            rest, experts, NUM_EXPERTS, EXPERTS, NUM_GROUPS, TOP_GROUPS, GROUP_BEST
        )
    places = tl.arange(0, CHOICES)
    chosen = tl.zeros([CHOICES], tl.int32)
    kept = tl.zeros([CHOICES], tl.float32)
    for choice in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        expert, best = _best(  # pyright: ignore[reportGeneralTypeIssues]
            rest, experts, NUM_EXPERTS
        )
        if IS_SPARSE_MIXER:
            is_far = best - scores > margin * tl.maximum(tl.abs(scores), best)
            share = 1.0 / tl.sum(tl.where(is_far, 0.0, tl.exp(rest - best)), axis=0)
        else:
            share = tl.sum(tl.where(experts == expert, scores, 0.0), axis=0)
            if IS_LATE:
                share = 1.0 / (1.0 + tl.exp(-share))
        chosen = tl.where(places == choice, expert, chosen)
        kept = tl.where(places == choice, share, kept)
        rest = tl.where(experts == expert, -float("inf"), rest)
    if NORMALISED:
        kept /= tl.sum(kept, axis=0) + LEAST_SUM
    target = token * TOP_K + places
    tl.store(ids + target, chosen.to(tl.int64), mask=places < TOP_K)
    tl.store(shares + target, kept * scale, mask=places < TOP_K)


@triton.jit
def _best(scores, places, COUNT: tl.constexpr):
    """Return place and value of the first of the highest scores; the last place if all are nan."""
    best = tl.max(scores, axis=0)
    return tl.min(tl.where(scores == best, places, COUNT - 1), axis=0), best


@triton.jit
def _in_best_groups(
    scores,
    experts,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):
    """Set the scores outside a token's best groups to -inf."""
    own = experts // (NUM_EXPERTS // NUM_GROUPS)
    is_in = tl.zeros([EXPERTS], tl.int1)
    # There are no more groups than experts.
    groups = experts
    of_groups = tl.full([EXPERTS], -float("inf"), tl.float32)
    for group in tl.static_range(NUM_GROUPS):  # pyright: ignore[reportGeneralTypeIssues]
        rest = tl.where(own == group, scores, -float("inf"))
        total = 0.0
        for _ in tl.static_range(GROUP_BEST):  # pyright: ignore[reportGeneralTypeIssues]
            expert, best = _best(  # pyright: ignore[reportGeneralTypeIssues]
                rest, experts, NUM_EXPERTS
            )
            rest = tl.where(experts == expert, -float("inf"), rest)
            total += best
        of_groups = tl.where(groups == group, total, of_groups)
    for _ in tl.static_range(TOP_GROUPS):  # pyright: ignore[reportGeneralTypeIssues]
        group, _ = _best(of_groups, groups, NUM_GROUPS)  # pyright: ignore[reportGeneralTypeIssues]
        of_groups = tl.where(groups == group, -float("inf"), of_groups)
        is_in = is_in | (own == group)
    return tl.where(is_in, scores, -float("inf"))


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    pairs,
    starts,
    tile_starts,
    expert_ids,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The pairs of one expert, and where they begin after those of the experts before."""
    wait_for_prior_kernels()
    expert = tl.program_id(0)
    counts = tl.zeros([BINS], tl.int32)
    for begin in range(0, num_pairs, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        owners = tl.load(expert_ids + at, mask=at < num_pairs, other=NUM_EXPERTS)
        counts += tl.histogram(owners.to(tl.int32), BINS)
    owner = tl.arange(0, BINS)
    tiles = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(owner < expert, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(owner < expert, tiles, 0), axis=0)
    tl.store(starts + expert, first)
    tl.store(tile_starts + expert, first_tile)
    end = tl.sum(tl.where(owner <= expert, counts, 0), axis=0)
    if expert == NUM_EXPERTS - 1:
        tl.store(starts + NUM_EXPERTS, end)
        tl.store(tile_starts + NUM_EXPERTS, tl.sum(tl.where(owner <= expert, tiles, 0), axis=0))
    begin = 0
    while (first < end) & (begin < num_pairs):
        at = begin + tl.arange(0, CHUNK)
        is_own = tl.load(expert_ids + at, mask=at < num_pairs, other=NUM_EXPERTS) == expert
        before = tl.cumsum(is_own.to(tl.int32), axis=0)
        tl.store(pairs + first + before - 1, at, mask=is_own)
        first += tl.sum(is_own.to(tl.int32), axis=0)
        begin += CHUNK

"""The indexer of sparse attention; for the contract see ``kernels.reference.sparse``.

    scores    a program for a token and a run of its positions: a product of heads and keys
    select    the slots of the highest ones (``selection.py``)

A token with no more than ``top_k`` positions is not scored. Scores are products of one shape for
each tile of keys, and sums over heads in one order: which positions a token selects does not depend
on what else is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention import DeviceGeometry
from kernels.sparse import IndexQuery
from kernels.triton.launch import dot_width, launch, power_of_2, wait_for_prior_kernels
from kernels.triton.selection import select_highest
from kernels.triton.tiles import dot, rows_of_tile

# Of the scores of a step; more tokens are taken one group after another.
_SCORES_BYTES = 256 << 20
_SPAN = 1024  # positions that a program scores
_TILE = 64
_WEIGHT_HEADS = 4  # per program
_WEIGHT_TILE = 1024

MAX_INDEX_HEADS = 128
MAX_INDEX_DIM = 256


def unsupported_reason(num_heads: int, head_dim: int) -> str | None:
    """Return why there is no kernel for an indexer of this size; None if there is."""
    if num_heads > MAX_INDEX_HEADS or head_dim > MAX_INDEX_DIM:
        return f"an indexer of {num_heads} heads of {head_dim} has no kernel"
    return None


def index_rope_store(
    query: torch.Tensor | None,
    key: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor],
    index_keys: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """One launch; see ``kernels.reference.sparse``. Queries and keys are contiguous."""
    num_tokens, width = key.shape
    half = rotation[0].shape[-1]
    num_heads = 0 if query is None else query.shape[1]
    launch(
        _index_rope_store_kernel,
        (num_tokens,),
        query,
        key,
        *norm,
        *rotation,
        index_keys,
        slot_mapping,
        eps,
        NUM_HEADS=num_heads,
        HEADS=power_of_2(max(num_heads, 1)),
        DIM=width,
        WIDTH=power_of_2(width),
        HALF_DIM=half,
        HALF=power_of_2(half),
        num_warps=4,
    )


def index_weights(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One launch; see ``kernels.reference.sparse``."""
    x = x.contiguous()
    num_tokens, hidden = x.shape
    num_heads = weight.shape[0]
    out = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=x.device)
    launch(
        _index_weights_kernel,
        (num_tokens, -(-num_heads // _WEIGHT_HEADS)),
        out,
        x,
        weight,
        NUM_HEADS=num_heads,
        HEADS=_WEIGHT_HEADS,
        HIDDEN=hidden,
        TILE=min(_WEIGHT_TILE, power_of_2(hidden)),
        num_warps=4,
    )
    return out


def select_slots(
    index: IndexQuery,
    index_keys: torch.Tensor,
    tokens: DeviceGeometry,
    longest: int,
    slots: torch.Tensor,
) -> None:
    """For each group of tokens: scores, then a selection; see ``kernels.reference.sparse``."""
    query, weights = index
    count = query.shape[0]
    step = max(1, _SCORES_BYTES // (4 * longest))
    scores = torch.empty((min(step, count), longest), dtype=torch.float32, device=query.device)
    for begin in range(0, count, step):
        part = slice(begin, begin + step)
        _select_group(
            IndexQuery(query[part], weights[part]),
            index_keys,
            tokens._replace(seq_lens=tokens.seq_lens[part], slots=tokens.slots[part]),
            scores,
            slots[part],
        )


def _select_group(
    index: IndexQuery,
    index_keys: torch.Tensor,
    tokens: DeviceGeometry,
    scores: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    query, weights = index
    count, num_heads, width = query.shape
    longest, top_k, block_size = scores.shape[1], slots.shape[1], index_keys.shape[2]
    launch(
        _index_scores_kernel,
        (count, -(-longest // _SPAN)),
        scores,
        query,
        weights,
        index_keys,
        tokens.seq_lens,
        tokens.slots,
        tokens.tables,
        tokens.tables.stride(0),
        longest,
        TOP_K=top_k,
        NUM_HEADS=num_heads,
        HEADS=dot_width(num_heads),
        DIM=width,
        WIDTH=dot_width(width),
        BLOCK_SIZE=block_size,
        SPAN=_SPAN,
        TILE=_TILE,
        num_warps=4,
        num_stages=3,
    )
    # The last group may have fewer tokens than there is room for.
    select_highest(scores[:count], tokens, slots, block_size)


@triton.jit
def _index_rope_store_kernel(
    query,  # None: there are none
    key,
    weight,
    bias,
    cos,
    sin,
    keys,
    slot_mapping,
    eps,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF_DIM: tl.constexpr,
    HALF: tl.constexpr,
):
    """One token: its queries' first two halves rotated, its key normed and its halves rotated."""
    wait_for_prior_kernels()
    token = tl.program_id(0).to(tl.int64)
    dims, halves = tl.arange(0, WIDTH), tl.arange(0, HALF)
    in_half, in_key = halves < HALF_DIM, dims < DIM
    c = tl.load(cos + token * HALF_DIM + halves, mask=in_half, other=0.0)
    s = tl.load(sin + token * HALF_DIM + halves, mask=in_half, other=0.0)
    if query is not None:
        heads = tl.arange(0, HEADS)
        place = query + (token * NUM_HEADS + heads[:, None]) * DIM + halves[None, :]
        is_query = (heads < NUM_HEADS)[:, None] & in_half[None, :]
        first = tl.load(place, mask=is_query, other=0.0).to(tl.float32)
        second = tl.load(place + HALF_DIM, mask=is_query, other=0.0).to(tl.float32)
        turned = first * c[None, :] - second * s[None, :]
        other = second * c[None, :] + first * s[None, :]
        tl.store(place, turned.to(query.dtype.element_ty), mask=is_query)
        tl.store(place + HALF_DIM, other.to(query.dtype.element_ty), mask=is_query)

    own = key + token * DIM
    x = tl.load(own + dims, mask=in_key, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / DIM
    apart = tl.where(in_key, x - mean, 0.0)
    factor = tl.rsqrt(tl.sum(apart * apart, axis=0) / DIM + eps)
    slot = tl.load(slot_mapping + token)
    is_stored, to = slot >= 0, keys + slot * DIM
    normed = _normed(own, weight, bias, mean, factor, dims, in_key)
    behind = in_key & (dims >= 2 * HALF_DIM) & is_stored
    tl.store(to + dims, normed, mask=behind)
    first = _normed(own, weight, bias, mean, factor, halves, in_half).to(tl.float32)
    second = _normed(own, weight, bias, mean, factor, halves + HALF_DIM, in_half).to(tl.float32)
    is_turned = in_half & is_stored
    turned = (first * c - second * s).to(keys.dtype.element_ty)
    tl.store(to + halves, turned, mask=is_turned)
    other = (second * c + first * s).to(keys.dtype.element_ty)
    tl.store(to + HALF_DIM + halves, other, mask=is_turned)


@triton.jit
def _normed(own, weight, bias, mean, factor, dims, is_read):
    """Return some of a key's normed numbers, rounded."""
    x = tl.load(own + dims, mask=is_read, other=0.0).to(tl.float32)
    by = tl.load(weight + dims, mask=is_read, other=0.0).to(tl.float32)
    plus = tl.load(bias + dims, mask=is_read, other=0.0).to(tl.float32)
    return ((x - mean) * factor * by + plus).to(own.dtype.element_ty)


@triton.jit
def _index_weights_kernel(
    out,
    x,
    weight,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HIDDEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Some heads' weights of one token."""
    wait_for_prior_kernels()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = heads < NUM_HEADS
    total = tl.zeros([HEADS, TILE], tl.float32)
    for begin in range(0, HIDDEN, TILE):
        dims = begin + tl.arange(0, TILE)
        in_row = dims < HIDDEN
        row = tl.load(x + token * HIDDEN + dims, mask=in_row, other=0.0).to(tl.float32)
        place = weight + heads[:, None] * HIDDEN + dims[None, :]
        by = tl.load(place, mask=is_head[:, None] & in_row[None, :], other=0.0)
        total += by * row[None, :]
    tl.store(out + token * NUM_HEADS + heads, tl.sum(total, axis=1), mask=is_head)


# Arguments that change from step to step are not specialised on: see plan.py.
@triton.jit(
    do_not_specialize=["table_stride", "longest"],
    do_not_specialize_on_alignment=["query", "weights", "seq_lens", "lines", "tables"],
)
def _index_scores_kernel(
    scores,  # [tokens, longest] float32
    query,
    weights,
    keys,
    seq_lens,
    lines,  # of the tables
    tables,
    table_stride,
    longest,
    TOP_K: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
):
    """A token's scores of a run of its positions."""
    wait_for_prior_kernels()
    token = tl.program_id(0).to(tl.int64)
    length, begin = tl.load(seq_lens + token), tl.program_id(1) * SPAN
    if (length <= TOP_K) | (begin >= length):
        return
    heads, dims = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    is_head, in_key = heads < NUM_HEADS, (dims < DIM)[None, :]
    place = query + (token * NUM_HEADS + heads[:, None]) * DIM + dims[None, :]
    q = tl.load(place, mask=is_head[:, None] & in_key, other=0.0)
    w = tl.load(weights + token * NUM_HEADS + heads, mask=is_head, other=0.0)
    table = tables + tl.load(lines + token).to(tl.int64) * table_stride
    for tile in range(begin, tl.minimum(begin + SPAN, length), TILE):
        positions = tile + tl.arange(0, TILE)
        is_used = positions < length
        first_row, rows = rows_of_tile(  # pyright: ignore[reportGeneralTypeIssues]
            table, tile, is_used, 0, 1, BLOCK_SIZE, TILE
        )
        base = keys + first_row * DIM + rows[:, None] * DIM
        k = tl.load(base + dims[None, :], mask=is_used[:, None] & in_key, other=0.0)
        products = tl.maximum(dot(k, tl.trans(q)), 0.0, propagate_nan=tl.PropagateNan.ALL)
        total = tl.sum(products * w[None, :], axis=1)
        tl.store(scores + token * longest + positions, total, mask=is_used)

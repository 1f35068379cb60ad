"""The tokens of a step of single queries, from their projections to the first of their scores.

In a step of few sequences each kernel costs more for its place in the chain than for its work, so
``decode.py`` does there what ``norm_rope_store`` does elsewhere: every program norms and rotates
the queries of its part, and the one with the last of a row's slots also stores the new key and
value. It takes them from its registers. No program therefore reads what this kernel writes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.tiles import tanh


@triton.jit
def load_heads(
    projected,  # the token's row, [all heads, HEAD_DIM]
    heads,
    is_head,
    norm_weight,
    eps,
    cos,
    sin,
    token,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Return some heads of a token, normed and rotated: [heads, DIM] float32, 0 if masked.

    ``norm_weight`` and ``cos`` may be None.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, DIM)
    is_first = dims < HALF
    others = tl.where(is_first, dims + HALF, dims - HALF)
    in_head = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    begin = heads[:, None] * HEAD_DIM
    own = tl.load(projected + begin + dims[None, :], mask=in_head, other=0.0).to(tl.float32)
    other = own
    if cos is not None:
        # The other half of a head is read again: its numbers are in other threads.
        place = projected + begin + others[None, :]
        other = tl.load(place, mask=in_head, other=0.0).to(tl.float32)
    if norm_weight is not None:
        scale = tl.rsqrt(tl.sum(own * own, axis=1) / HEAD_DIM + eps)[:, None]
        by = tl.load(norm_weight + begin + dims[None, :], mask=in_head, other=0.0)
        own = own * scale * by.to(tl.float32)
        if cos is not None:
            by = tl.load(norm_weight + begin + others[None, :], mask=in_head, other=0.0)
            other = other * scale * by.to(tl.float32)
    if cos is not None:
        angle = token * HALF + tl.where(is_first, dims, others)
        c = tl.load(cos + angle, mask=dims < HEAD_DIM, other=0.0)
        s = tl.load(sin + angle, mask=dims < HEAD_DIM, other=0.0)
        own = own * c[None, :] + other * tl.where(is_first, -s, s)[None, :]
    return own


@triton.jit
def attend_new_token(
    q,  # [GROUP_ROWS, DIM], as in a product
    projected,
    keys,
    values,
    norm_weight,
    eps,
    cos,
    sin,
    token,
    slot,  # of the caches, or -1 for a token that is not stored
    is_attended,  # False: another program has the row's last slots, or there are none
    kv_head,
    scale,
    softcap,
    scale_in_cap,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Store a token's key and value, and begin the online softmax of its queries with them.

    Returns:
        top, total [GROUP_ROWS] and acc [GROUP_ROWS, DIM], as ``tiles.online_softmax`` goes on.
    """
    one, dims = tl.arange(0, 1), tl.arange(0, DIM)
    head = NUM_HEADS + kv_head + one
    is_head = is_attended & (one == 0)
    in_head = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    key = load_heads(  # pyright: ignore[reportGeneralTypeIssues]
        *(projected, head, is_head, norm_weight, eps, cos, sin, token, HEAD_DIM, DIM)
    ).to(keys.dtype.element_ty)
    place = (head + NUM_KV_HEADS)[:, None] * HEAD_DIM + dims[None, :]
    value = tl.load(projected + place, mask=in_head, other=0.0)

    block = slot // BLOCK_SIZE
    row = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot - block * BLOCK_SIZE
    is_stored = in_head & (slot >= 0)
    stored = row * HEAD_DIM + dims[None, :]
    tl.store(keys + stored, key, mask=is_stored)
    tl.store(values + stored, value.to(values.dtype.element_ty), mask=is_stored)

    scores = tl.sum(q.to(tl.float32) * key.to(tl.float32), axis=1)
    if HAS_SOFTCAP:
        scores = tanh(scores * scale_in_cap) * softcap
    else:
        scores *= scale
    top = tl.where(is_attended, scores, -float("inf"))
    total = tl.full(scores.shape, 1.0, tl.float32) * is_attended.to(tl.float32)
    acc = tl.zeros(q.shape, tl.float32) + value.to(tl.float32)
    return top, total, acc

"""Bidirectional attention within each text, over a batch of texts of any lengths.

Texts of similar lengths are padded to the longest and go through torch's attention together; the
padding is masked, and is at most a quarter of the tokens.

Where tokens attend to their neighbours only, a text is cut into blocks of queries, and each meets
the keys of its block and of both margins: time and memory grow with a text's length, not with its
square.

    keys     ┌──margin──┬──────block──────┬──margin──┐
    queries             └─────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

_SLACK_TOKENS = 4
_BLOCK_TOKENS = 128


class LocalBlocks(NamedTuple):
    """How texts of a bucket are cut for local attention."""

    num_blocks: int  # of a text; the last one may end behind it
    block_size: int
    margin: int  # tokens
    # [B * num_blocks, 1, block_size, block_size + 2 * margin] bool, true where a query may attend.
    mask: torch.Tensor


class Bucket(NamedTuple):
    """Texts of similar lengths, padded to the longest: B texts of T tokens."""

    tokens: torch.Tensor  # [B * T] int64, indices into the batch; arbitrary for padding
    num_texts: int
    is_token: torch.Tensor | None  # [B, T] bool; None: there is no padding
    # Of the scores, [B or 1, heads or 1, T or 1, T]: an additive bias, or a boolean mask.
    mask: torch.Tensor | None
    local: LocalBlocks | None  # None: the window, if there is one, holds all tokens


Bias = Callable[[int], torch.Tensor]  # T -> [heads, T, T], added to the scores of T tokens


def make_buckets(
    lengths: Sequence[int],
    device: torch.device,
    bias: Bias | None = None,
    window: int | None = None,
) -> list[Bucket]:
    """Group the texts of a batch by length.

    Args:
        lengths: of the concatenated texts, in tokens.
        device: of the batch.
        bias: of the model's scores, if it has one.
        window: the distance up to which tokens attend in the model's local layers, if it has any.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    buckets: list[Bucket] = []
    members: list[int] = []
    for index in order:
        if members and lengths[index] > lengths[members[0]] * 5 // 4 + _SLACK_TOKENS:
            buckets.append(_bucket(members, starts, lengths, device, bias, window))
            members = []
        members.append(index)
    if members:
        buckets.append(_bucket(members, starts, lengths, device, bias, window))
    return buckets


def attend(
    fused: torch.Tensor,
    buckets: Sequence[Bucket],
    num_heads: int,
    num_kv_heads: int | None = None,
    *,
    is_local: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Scaled dot-product attention without a causal mask.

    Args:
        fused: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries, keys and values.
        buckets: of the batch.
        num_heads: of the queries.
        num_kv_heads: of the keys and of the values, each for as many queries in succession; None:
            one for each query.
        is_local: tokens attend within the window that the buckets were made with.
        scale: of scores; None: 1 / sqrt(head_dim).

    Returns:
        [num_tokens, num_heads * head_dim]
    """
    num_kv_heads = num_kv_heads or num_heads
    head_dim = fused.shape[1] // (num_heads + 2 * num_kv_heads)
    size, sizes = num_heads * head_dim, (num_heads, num_kv_heads, num_kv_heads)
    out = torch.empty((fused.shape[0], size), dtype=fused.dtype, device=fused.device)
    for bucket in buckets:
        padded = fused.index_select(0, bucket.tokens)
        padded = padded.view(bucket.num_texts, -1, sum(sizes), head_dim)
        query, key, value = padded.split(sizes, dim=2)  # [B, T, heads, head_dim]
        if num_kv_heads != num_heads:
            key, value = (
                each.repeat_interleave(num_heads // num_kv_heads, dim=2) for each in (key, value)
            )
        if is_local and bucket.local is not None:
            attended = _attend_locally(query, key, value, bucket.local, scale)
        else:
            attended = functional.scaled_dot_product_attention(
                *(each.transpose(1, 2) for each in (query, key, value)),
                attn_mask=bucket.mask,
                scale=scale,
            ).transpose(1, 2)
        flat = attended.reshape(-1, size)
        if bucket.is_token is None:
            out.index_copy_(0, bucket.tokens, flat)
        else:
            kept = bucket.is_token.view(-1)
            out.index_copy_(0, bucket.tokens[kept], flat[kept])
    return out


def _attend_locally(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    local: LocalBlocks,
    scale: float | None,
) -> torch.Tensor:
    """Each [B, T, heads, head_dim] -> the same."""
    num_texts, num_tokens, num_heads, head_dim = query.shape
    num_blocks, block, margin, mask = local
    behind = num_blocks * block - num_tokens
    query = functional.pad(query, (0, 0, 0, 0, 0, behind))
    query = query.reshape(-1, block, num_heads, head_dim).transpose(1, 2)

    def overlapping(tensor: torch.Tensor) -> torch.Tensor:
        wider = functional.pad(tensor, (0, 0, 0, 0, margin, margin + behind))
        pieces = wider.unfold(1, block + 2 * margin, block)  # [B, blocks, heads, head_dim, piece]
        return pieces.flatten(0, 1).transpose(2, 3)

    attended = functional.scaled_dot_product_attention(
        query, overlapping(key), overlapping(value), attn_mask=mask, scale=scale
    )  # [B * blocks, heads, block, head_dim]
    whole = attended.transpose(1, 2).reshape(num_texts, -1, num_heads, head_dim)
    return whole[:, :num_tokens]


def _bucket(
    members: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    device: torch.device,
    bias: Bias | None,
    window: int | None,
) -> Bucket:
    begins = torch.tensor([starts[index] for index in members])
    counts = torch.tensor([lengths[index] for index in members])
    steps = torch.arange(int(counts.max()))
    is_token = steps[None, :] < counts[:, None]  # [B, T]
    tokens = torch.where(is_token, begins[:, None] + steps[None, :], begins[:, None])
    kept = None if bool(is_token.all()) else is_token.to(device)
    mask = None if kept is None else kept[:, None, None, :]
    if bias is not None:
        added = bias(steps.numel())[None]
        mask = added if mask is None else added.masked_fill(~mask, float("-inf"))
    local = None
    if window is not None and window < steps.numel() - 1:
        local = _local_blocks(counts.to(device), steps.numel(), window)
    return Bucket(tokens.view(-1).to(device), len(members), kept, mask, local)


def _local_blocks(counts: torch.Tensor, num_tokens: int, window: int) -> LocalBlocks:
    """Cut texts of ``counts`` tokens [B], padded to ``num_tokens``, for local attention.

    A query behind a text's end may have nothing to attend to, which gives NaNs that nothing reads.
    """
    block = min(_BLOCK_TOKENS, num_tokens)
    num_blocks = -(-num_tokens // block)
    at = torch.arange(block + 2 * window, device=counts.device) - window
    near = (at - at[window : window + block, None]).abs() <= window  # [block, piece]
    keys = at + torch.arange(num_blocks, device=counts.device)[:, None] * block  # [blocks, piece]
    is_key = (keys >= 0) & (keys < counts[:, None, None])  # [B, blocks, piece]
    mask = is_key.flatten(0, 1)[:, None, None, :] & near
    return LocalBlocks(num_blocks, block, window, mask)

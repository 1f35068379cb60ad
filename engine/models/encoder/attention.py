"""Bidirectional attention within each text, over a batch of texts of any lengths.

Texts of similar lengths are padded to the longest and go through torch's attention together; the
padding is masked, and is at most a quarter of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

_SLACK_TOKENS = 4


class Bucket(NamedTuple):
    """Texts of similar lengths, padded to the longest: B texts of T tokens."""

    tokens: torch.Tensor  # [B * T] int64, indices into the batch; arbitrary for padding
    num_texts: int
    is_token: torch.Tensor | None  # [B, T] bool; None: there is no padding
    # Of the scores, [B or 1, heads or 1, T or 1, T]: an additive bias, or a boolean mask.
    mask: torch.Tensor | None


Bias = Callable[[int], torch.Tensor]  # T -> [heads, T, T], added to the scores of T tokens


def make_buckets(
    lengths: Sequence[int], device: torch.device, bias: Bias | None = None
) -> list[Bucket]:
    """Group the texts of a batch by length.

    Args:
        lengths: of the concatenated texts, in tokens.
        device: of the batch.
        bias: of the model's scores, if it has one.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    buckets: list[Bucket] = []
    members: list[int] = []
    for index in order:
        if members and lengths[index] > lengths[members[0]] * 5 // 4 + _SLACK_TOKENS:
            buckets.append(_bucket(members, starts, lengths, device, bias))
            members = []
        members.append(index)
    if members:
        buckets.append(_bucket(members, starts, lengths, device, bias))
    return buckets


def attend(fused: torch.Tensor, buckets: Sequence[Bucket], num_heads: int) -> torch.Tensor:
    """Scaled dot-product attention without a causal mask.

    Args:
        fused: [num_tokens, 3 * hidden_size], queries, keys and values.
        buckets: of the batch.
        num_heads: of the model.

    Returns:
        [num_tokens, hidden_size]
    """
    size = fused.shape[1] // 3
    out = torch.empty((fused.shape[0], size), dtype=fused.dtype, device=fused.device)
    for bucket in buckets:
        padded = fused.index_select(0, bucket.tokens)  # [B * T, 3 * hidden_size]
        shape = (bucket.num_texts, -1, 3, num_heads, size // num_heads)
        query, key, value = padded.view(shape).permute(2, 0, 3, 1, 4)  # [B, heads, T, head_dim]
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=bucket.mask)
        flat = attended.transpose(1, 2).reshape(-1, size)
        if bucket.is_token is None:
            out.index_copy_(0, bucket.tokens, flat)
        else:
            kept = bucket.is_token.view(-1)
            out.index_copy_(0, bucket.tokens[kept], flat[kept])
    return out


def _bucket(
    members: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    device: torch.device,
    bias: Bias | None,
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
    return Bucket(tokens.view(-1).to(device), len(members), kept, mask)

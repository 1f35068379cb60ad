"""Scores that depend on how far two tokens are apart: T5's buckets, as MPNet has them."""

from __future__ import annotations

import math

import torch

_MAX_DISTANCE = 128  # tokens further apart are one bucket


def distance_buckets(num_tokens: int, num_buckets: int, device: torch.device) -> torch.Tensor:
    """The bucket of each pair of positions: [num_tokens, num_tokens] int64.

    Half of the buckets is for either direction; of these, half for small distances one by one,
    half for larger ones by their logarithm (Raffel et al. 2020).
    """
    positions = torch.arange(num_tokens, device=device)
    behind = positions[:, None] - positions[None, :]  # by how much the key is before the query
    half = num_buckets // 2
    exact = half // 2
    distance = behind.abs()
    ratio = (distance.clamp(min=1).float() / exact).log() / math.log(_MAX_DISTANCE / exact)
    far = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(distance < exact, distance, far) + half * (behind < 0)

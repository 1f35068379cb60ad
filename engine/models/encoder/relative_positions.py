"""Relative position buckets as in T5, which MPNet uses."""

from __future__ import annotations

import math

import torch

_MAX_DISTANCE = 128  # tokens further apart share one bucket


def distance_buckets(num_tokens: int, num_buckets: int, device: torch.device) -> torch.Tensor:
    """Return the bucket of each pair of positions: [num_tokens, num_tokens] int64.

    Half of the buckets are for either direction. Of these, half are for single small distances and
    half for larger ones on a logarithmic scale (Raffel et al. 2020).
    """
    positions = torch.arange(num_tokens, device=device)
    behind = positions[:, None] - positions[None, :]  # distance from key to query
    half = num_buckets // 2
    exact = half // 2
    distance = behind.abs()
    ratio = (distance.clamp(min=1).float() / exact).log() / math.log(_MAX_DISTANCE / exact)
    far = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(distance < exact, distance, far) + half * (behind < 0)

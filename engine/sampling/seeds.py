"""Counter-based randomness: the keys of a position, from a request's seed."""

from __future__ import annotations

import hashlib

import numpy as np

from engine.types import Request

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def request_seed(request: Request) -> int:
    """The request's seed; one made from its id where it was built without."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    digest = hashlib.blake2b(request.id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def position_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Two 32-bit keys of each (seed, position), by splitmix64 (Steele et al. 2014).

    The seed is mixed before the position is added, so that seeds 1 and 2 are not one stream
    shifted by a token.

    Args:
        seeds, positions: [n] int64.

    Returns:
        [n, 2] int32.
    """
    mixed = _mix(seeds.view(np.uint64) + _GOLDEN) + positions.view(np.uint64) * _GOLDEN
    return _mix(mixed).view(np.int32).reshape(-1, 2)


def _mix(z: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser; unsigned arithmetic wraps."""
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))

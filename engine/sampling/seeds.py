"""The seed of a request; a sampled token depends on it and on the position (``kernels``)."""

from __future__ import annotations

import hashlib

from engine.types import Request


def request_seed(request: Request) -> int:
    """The request's seed, or one derived from its id if it has none."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    digest = hashlib.blake2b(request.id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)

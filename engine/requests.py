"""Expands one user's request for n continuations into n single-sequence requests."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec

from engine.audio.types import AudioClip
from engine.images.types import Image
from engine.types import Adapter, Request, SamplingParams

_MASK = 2**64 - 1


def fan_out(
    request_id: str,
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    images: Sequence[Image] = (),
    audio: Sequence[AudioClip] = (),
    priority: int = 0,
    cache_salt: str = "",
    adapter: Adapter | None = None,
    tenant: str = "",
    weight: float = 1.0,
    deadline_s: float | None = None,
    background: bool = False,
    follows: bool = False,
    is_followed: bool = False,
) -> list[Request]:
    """Make the requests for ``sampling.n`` continuations of one prompt, the leader first.

    The leader's id is ``request_id``; its forks are ``request_id/1`` and so on. Each has its own
    seed derived from the request's seed, which is drawn here if it is not set. Choice ``i`` of a
    seeded request is therefore always the same text, whatever else is running.
    """
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    prompt = tuple(prompt_token_ids)
    arrival_s = time.monotonic()
    return [
        Request(
            id=request_id if index == 0 else f"{request_id}/{index}",
            prompt_token_ids=prompt,
            images=tuple(images),
            audio=tuple(audio),
            sampling=msgspec.structs.replace(sampling, n=1, seed=_choice_seed(seed, index)),
            fork_of=request_id if index else None,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            tenant=tenant,
            weight=weight,
            background=background,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
            follows=follows,
            is_followed=is_followed,
        )
        for index in range(sampling.n)
    ]


def _choice_seed(seed: int, index: int) -> int:
    """The seed of choice ``index``: the request's own for 0, else by splitmix64 (Steele 2014)."""
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1

"""Configures each of several engines on one machine: its number, and its share of resources.

GPUs and KV caches belong to one engine. What the machine has only once, the memory that is free
before any of them starts and, on a CPU, the cores, is divided evenly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from engine.client import LoadProgress
from engine.config import EngineConfig
from engine.memory import free_host_bytes

InfoT = TypeVar("InfoT")


def replica_configs(config: EngineConfig, count: int) -> list[EngineConfig]:
    """The config of each of ``count`` engines; for one, ``config`` itself."""
    if count == 1:
        return [config]
    share_bytes = free_host_bytes() // count
    return [
        msgspec.structs.replace(
            config, replica=number, num_replicas=count, host_share_bytes=share_bytes
        )
        for number in range(count)
    ]


async def start_all(
    starts: Sequence[Callable[[LoadProgress], Awaitable[InfoT]]],
    on_progress: LoadProgress | None = None,
) -> InfoT:
    """Load all engines in parallel; returns the result of the first.

    Args:
        starts: each starts one engine and returns once it has loaded.
        on_progress: called with the mean progress of all engines.

    Raises:
        ModelLoadError: one cannot load; the others are cancelled.
        EngineDead: one died while loading.
    """
    shares = [0.0] * len(starts)

    def told(index: int, fraction: float, what: str) -> None:
        shares[index] = fraction
        if on_progress is not None:
            on_progress(sum(shares) / len(shares), what)

    waits = [
        asyncio.ensure_future(start(partial(told, index))) for index, start in enumerate(starts)
    ]
    try:
        return (await asyncio.gather(*waits))[0]
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

"""What each of several engines on one machine is told: its number, and its share of what they have
in common.

GPUs and KV caches are an engine's own. What the machine has once, the memory that is free before
any of them starts and, on a CPU, the cores, is divided by their number.
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
    """The config of each of ``count`` engines; of one, ``config`` itself."""
    if count == 1:
        return [config]
    share_bytes = free_host_bytes() // count
    return [
        msgspec.structs.replace(
            config, replica=number, num_replicas=count, host_share_bytes=share_bytes
        )
        for number in range(count)
    ]


async def start_together(
    starts: Sequence[Callable[[LoadProgress], Awaitable[InfoT]]],
    on_progress: LoadProgress | None = None,
) -> InfoT:
    """Have all engines load at once, telling their mean progress; what is told of the first.

    Args:
        starts: has one load, and returns once it has.
        on_progress: of all of them.

    Raises:
        ModelLoadError: one cannot load; the others are not waited for.
        EngineDead: one has died as it loaded.
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

"""What each of several engines on one machine is told: its number, and its share of what they have
in common.

GPUs and KV caches are an engine's own. What the machine has once, the memory that is free before
any of them starts and, on a CPU, the cores, is divided by their number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import msgspec

from engine.client import LoadProgress
from engine.config import EngineConfig
from engine.memory import free_host_bytes
from engine.types import EngineInfo


class Startable(Protocol):
    """An engine's client or its supervisor."""

    async def start(self, on_progress: LoadProgress | None = None) -> EngineInfo:
        """Load the model. Raises ModelLoadError or EngineDead."""
        ...


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
    engines: Sequence[Startable], on_progress: LoadProgress | None = None
) -> EngineInfo:
    """Have all engines load at once, telling their mean progress; the info of the first.

    Raises:
        ModelLoadError: one cannot load; the others are not waited for.
        EngineDead: one has died as it loaded.
    """
    shares = [0.0] * len(engines)

    def told(index: int, fraction: float, what: str) -> None:
        shares[index] = fraction
        if on_progress is not None:
            on_progress(sum(shares) / len(shares), what)

    waits = [
        asyncio.create_task(engine.start(partial(told, index)))
        for index, engine in enumerate(engines)
    ]
    try:
        return (await asyncio.gather(*waits))[0]
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

"""Sends a list of requests in a closed or an open loop, and samples the server's gauges meanwhile.

A closed loop keeps a fixed number of requests in flight and sends the next when one ends, so a slow
server gets less load. An open loop sends at the times of a Poisson process regardless of the
server, and latencies count from those times, so that delays in sending are not left out (the
"coordinated omission" of Gil Tene).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.client import Client, StreamRecord
from loadtest.scrape import scrape
from loadtest.workloads import SampleRequest

_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass(frozen=True)
class Load:
    """How requests are sent: ``concurrency`` in flight, or ``rate`` per second."""

    concurrency: int | None = None
    rate: float | None = None

    def describe(self) -> str:
        """A short description for a table."""
        if self.rate is not None:
            return f"{self.rate:g} requests/s"
        return f"concurrency {self.concurrency}"


@dataclass(frozen=True)
class Endpoint:
    """The route, and the parts of the request body that do not depend on the prompt."""

    chat: bool
    model: str
    extra: dict[str, Any]

    @property
    def path(self) -> str:
        """The route's path."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, request: SampleRequest) -> dict[str, Any]:
        """The request body for one prompt, streamed and with usage."""
        prompt: dict[str, Any] = (
            {"messages": [{"role": "user", "content": request.prompt}]}
            if self.chat
            else {"prompt": request.prompt}
        )
        return {
            "model": self.model,
            **prompt,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }


async def send_all(
    client: Client,
    endpoint: Endpoint,
    requests: Sequence[SampleRequest],
    load: Load,
    rng: random.Random,
    on_done: Callable[[StreamRecord], None] = lambda _: None,
) -> list[StreamRecord]:
    """Send every request and return its record, in the order of ``requests``."""
    records: list[StreamRecord] = [StreamRecord() for _ in requests]

    async def send(index: int, due_s: float | None = None) -> None:
        record = await client.stream(endpoint.path, endpoint.body(requests[index]), due_s=due_s)
        records[index] = record
        on_done(record)

    if load.rate is not None:
        await _open_loop(send, len(requests), load.rate, rng)
    else:
        await _closed_loop(send, len(requests), load.concurrency or 1)
    return records


async def _closed_loop(send: Any, count: int, concurrency: int) -> None:
    indices = iter(range(count))

    async def worker() -> None:
        for index in indices:  # shared by all workers: each takes the next index
            await send(index)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, count)):
            group.create_task(worker())


async def _open_loop(send: Any, count: int, rate: float, rng: random.Random) -> None:
    due_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index in range(count):
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            group.create_task(send(index, due_s))
            due_s += rng.expovariate(rate)


class GaugeMonitor:
    """Samples the server's gauges about once a second during a run."""

    def __init__(self, client: Client, period_s: float = 1.0) -> None:
        self.samples: list[dict[str, float]] = []  # "t" (perf_counter seconds) and the gauges
        self._client = client
        self._period_s = period_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> GaugeMonitor:
        self._task = asyncio.create_task(self._poll())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _poll(self) -> None:
        while True:
            samples = await scrape(self._client)
            if not samples:
                return
            gauges = {name: samples[name] for name in _GAUGES if name in samples}
            self.samples.append({"t": time.perf_counter(), **gauges})
            await asyncio.sleep(self._period_s)

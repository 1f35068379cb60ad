"""Vectors across the process boundary, including after the engine has died."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from engine.client import EngineClient
from engine.pooling import PoolingParams
from engine.types import Request
from tests.engine.fakes import expected_embedding
from tests.engine.process.test_clients import (
    collect,
    inline_client,
    make_requests,
    subprocess_client,
)
from tests.engine.process.test_shared_engine import shared_engine


def pooling_requests(name: str, count: int = 6) -> list[Request]:
    return [
        Request(
            id=f"{name}{index}",
            prompt_token_ids=tuple((index + step) % 5 for step in range(3 + 7 * index)),
            pooling=PoolingParams(kind="mean" if index % 2 else "last", normalize=False),
        )
        for index in range(count)
    ]


async def check(client: EngineClient, requests: Sequence[Request]) -> None:
    for request, outputs in zip(
        requests, await asyncio.gather(*map(collect, client.submit(requests))), strict=True
    ):
        assert outputs[-1].finish_reason == "stop"
        assert outputs[-1].embedding == expected_embedding(request)
        assert not any(output.token_ids for output in outputs)


async def test_vectors_cross_the_boundary_beside_texts() -> None:
    for client in (inline_client(), subprocess_client()):
        await client.start()
        texts = client.submit(make_requests(4, 30))
        await check(client, pooling_requests("v"))
        await asyncio.gather(*map(collect, texts))
        assert client.stats.blocks.held == 0
        await client.close()


async def test_each_client_of_an_engine_gets_its_own(tmp_path: Path) -> None:
    async with shared_engine(tmp_path) as shared:
        first, second = shared.clients
        await asyncio.gather(
            check(first, pooling_requests("a")), check(second, pooling_requests("b"))
        )


async def test_vectors_outlive_the_engine(capfd) -> None:
    """It dies while computing them; they are requested again and delivered once."""
    client = subprocess_client(step_s=0.02)
    await client.start()
    checking = asyncio.create_task(check(client, pooling_requests("v", 12)))
    busy = asyncio.Event()
    client.on_output(lambda output: busy.set())
    await busy.wait()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    await checking
    assert client.num_restarts == 1
    await client.close()

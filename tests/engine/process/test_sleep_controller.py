"""Sleep and reload seen by clients: running, new and later requests, and status queries."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import msgspec
import pytest

from engine.config import NodesConfig
from engine.core import EngineCore
from engine.errors import EngineAsleep, InvalidParameter, SleepRefused
from engine.inline import InlineClient
from engine.types import Request
from tests.engine import fakes
from tests.engine.process.test_clients import (  # noqa: F401 (a fixture)
    MAX_LEN,
    collect,
    make_requests,
    start,
    tokens_of,
    until,
)
from tests.engine.process.test_shared_engine import own_requests, shared_engine

pytestmark = pytest.mark.usefixtures("only_new_objects_collected")

NEW = json.dumps({"new": "weights"})


def one(id_: str) -> Request:
    return msgspec.structs.replace(make_requests(1)[0], id=id_)


async def check(client, requests) -> None:
    told = await asyncio.gather(*map(collect, client.submit(requests)))
    for request, outputs in zip(requests, told, strict=True):
        text = tokens_of(outputs), outputs[-1].finish_reason
        assert text == fakes.expected_output(request, MAX_LEN)


async def test_who_runs_ends_and_who_comes_is_refused(start) -> None:  # noqa: F811
    client = await start(step_s=0.01)
    requests = make_requests(3, ignore_eos=True)
    running = asyncio.create_task(check(client, requests))
    await asyncio.sleep(0.05)
    falling = asyncio.create_task(client.sleep(1, 30.0))
    await asyncio.sleep(0.05)
    assert client.activity == "falling_asleep"
    (late,) = client.submit([one("late")])
    with pytest.raises(EngineAsleep):
        await collect(late)
    await running
    await falling
    assert client.activity == "asleep"
    (early,) = client.submit([one("early")])
    with pytest.raises(EngineAsleep, match="asleep"):
        await collect(early)
    await client.sleep(1, 0.0)  # it does
    with pytest.raises(SleepRefused):
        await client.reload(NEW, 0.0)
    await client.wake()
    await client.wake()  # it is
    assert client.activity == "serving"
    await check(client, requests)


async def test_who_is_awake_is_not_disturbed_by_being_woken(start) -> None:  # noqa: F811
    client = await start(step_s=0.01)
    running = asyncio.create_task(check(client, make_requests(3, max_tokens=190, ignore_eos=True)))
    await until(lambda: client.stats.num_running > 0)
    await client.wake()
    assert client.stats.num_running, "it has waited for them"
    await running


async def test_who_can_never_rest_ends_nobody_for_it() -> None:
    config = fakes.make_config(json.dumps({"step_s": 0.01}))
    nodes = NodesConfig(size=2, rank=0, master_addr="here", master_port=1, secret_file="secret")
    config = msgspec.structs.replace(config, tensor_parallel_size=2, nodes=nodes)
    client = InlineClient(
        config, load=lambda config, told: EngineCore(config, fakes.load(config, told))
    )
    await client.start()
    try:
        running = asyncio.create_task(check(client, make_requests(3, ignore_eos=True)))
        await asyncio.sleep(0.05)
        with pytest.raises(SleepRefused):
            await client.sleep(1, 0.0)
        with pytest.raises(SleepRefused):
            await client.reload(NEW, 0.0)
        await running
        assert client.activity == "serving"
    finally:
        await client.close()


async def test_patience_has_an_end(start) -> None:  # noqa: F811
    client = await start(step_s=0.01)
    streams = client.submit(make_requests(3, max_tokens=190, ignore_eos=True))
    await asyncio.sleep(0.05)
    await client.sleep(2, 0.05)
    for stream in streams:
        with pytest.raises(EngineAsleep):
            await collect(stream)
    await client.wake()
    await check(client, make_requests(3))


async def test_who_comes_while_weights_are_exchanged_is_served_by_the_new(start) -> None:  # noqa: F811
    client = await start(step_s=0.01)
    running = asyncio.create_task(check(client, make_requests(2, ignore_eos=True)))
    await asyncio.sleep(0.05)
    reloading = asyncio.create_task(client.reload(NEW, 30.0))
    await asyncio.sleep(0.05)
    assert client.activity == "reloading"
    (aborted,) = client.submit([one("aborted")])
    aborted.abort()
    (late,) = client.submit([one("late")])
    waiting = asyncio.create_task(collect(late))
    info = await reloading
    assert (info.model, info.generation, client.activity) == (NEW, 1, "serving")
    outputs = await waiting
    text = tokens_of(outputs), outputs[-1].finish_reason
    assert text == fakes.expected_output(one("late"), MAX_LEN)
    await running
    with pytest.raises(InvalidParameter, match="not these"):
        await client.reload(json.dumps({"refuse": "not these"}), 0.0)
    assert client.info.generation == 1
    await check(client, make_requests(2))


async def test_all_clients_are_told_and_an_engine_that_comes_after(tmp_path: Path) -> None:
    async with shared_engine(tmp_path, step_s=0.01) as shared:
        first, second = shared.clients
        await first.sleep(1, 0.0)
        await until(lambda: second.activity == "asleep")
        await second.wake()
        await first.reload(NEW, 0.0)
        assert first.info.generation == 1
        requests = own_requests(1, 2, 150, ignore_eos=True)
        streams = second.submit(requests)
        pid = shared.supervisor.pid
        assert pid is not None
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        for request, stream in zip(requests, streams, strict=True):
            outputs = await collect(stream)
            text = tokens_of(outputs), outputs[-1].finish_reason
            assert text == fakes.expected_output(request, MAX_LEN)
        assert shared.supervisor.num_restarts == 1
        assert (second.info.model, second.info.generation) == (NEW, 1)


async def test_what_has_begun_goes_on_while_the_engine_falls_asleep(start) -> None:  # noqa: F811
    """A beam search and its like: one request after the other, with nothing running between."""
    client = await start(step_s=0.01)

    def part(number: int, **place: bool) -> Request:
        return msgspec.structs.replace(one(f"part{number}"), **place)

    running = client.submit([part(0, is_followed=True)])
    await until(lambda: client.stats.num_running > 0)
    falling = asyncio.create_task(client.sleep(1, 30.0))
    await until(lambda: client.activity == "falling_asleep")
    await collect(running[0])
    for number in range(1, 4):
        assert client.activity == "falling_asleep"
        await check(client, [part(number, follows=True, is_followed=number < 3)])
    await falling
    with pytest.raises(EngineAsleep, match="asleep"):
        await check(client, [part(4, follows=True)])


async def test_what_is_not_followed_up_keeps_no_engine_awake(start) -> None:  # noqa: F811
    client = await start(step_s=0.01)
    abandoned = msgspec.structs.replace(one("first"), is_followed=True)
    await check(client, [abandoned])
    await client.sleep(1, 30.0)
    await client.wake()
    await check(client, [abandoned])
    await client.sleep(1, 0.0)  # without patience

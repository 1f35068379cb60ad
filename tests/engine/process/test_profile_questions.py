"""Profiles through a client: the answer goes to the caller, or the reason why there is none."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineDead, InvalidParameter, ProfileRefused
from engine.inline import InlineClient
from engine.process import SubprocessClient
from tests.engine import fakes
from tests.engine.process.test_clients import collect, make_requests
from tests.engine.process.test_shared_engine import shared_engine
from tests.engine.traces import steps


def config_for(directory: Path, **options: object) -> EngineConfig:
    config = fakes.make_config(json.dumps(options))
    return msgspec.structs.replace(config, profile_dir=str(directory))


def inline(directory: Path) -> InlineClient:
    def load(config, on_progress) -> EngineCore:
        return EngineCore(config, fakes.load(config, on_progress))

    return InlineClient(config_for(directory), load=load)


def subprocess(directory: Path) -> SubprocessClient:
    return SubprocessClient(config_for(directory), runner="tests.engine.fakes:load")


@asynccontextmanager
async def started(client: EngineClient) -> AsyncIterator[EngineClient]:
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def test_a_question_that_no_frame_can_hold_is_its_askers_failure(tmp_path: Path) -> None:
    async with started(subprocess(tmp_path)) as client:
        asked = asyncio.create_task(client.start_profile(2**70))
        submitted = asyncio.create_task(collect(client.submit(make_requests(1))[0]))
        with pytest.raises(OverflowError):
            await asked
        await submitted
        await client.start_profile(4)
        assert (await client.stop_profile()).num_steps == 0


@pytest.mark.parametrize("make", [inline, subprocess])
async def test_start_record_stop(tmp_path: Path, make) -> None:
    client = make(tmp_path)
    with pytest.raises(EngineDead):
        await client.start_profile(4)
    async with started(client):
        with pytest.raises(ProfileRefused):
            await client.stop_profile()
        with pytest.raises(InvalidParameter):
            await client.start_profile(0)
        await client.start_profile(4)
        with pytest.raises(ProfileRefused) as refused:
            await client.start_profile(4)
        assert refused.value.code == "profile_running"
        await asyncio.gather(*map(collect, client.submit(make_requests(3, ignore_eos=True))))
        trace = await client.stop_profile()
        assert trace.num_steps == 4
        assert len(steps(trace.path)) == 4
    with pytest.raises(EngineDead):
        await client.start_profile(4)


async def test_a_restart_ends_a_profile_and_what_is_asked_then_is_answered(tmp_path: Path) -> None:
    client = subprocess(tmp_path)
    async with started(client):
        await client.start_profile(4)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        asked = asyncio.create_task(client.stop_profile())
        (stream,) = client.submit(make_requests(1))
        await asyncio.sleep(0.05)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDead):
            await asked
        assert await collect(stream), "the next engine answers requests"
        with pytest.raises(ProfileRefused) as refused:
            await client.stop_profile()
        assert refused.value.code == "profile_not_running"
    assert os.listdir(tmp_path) == []


async def test_of_several_clients_each_is_told_its_own_answer(tmp_path: Path) -> None:
    async with shared_engine(tmp_path) as shared:
        first, second = shared.clients
        answers = await asyncio.gather(
            first.start_profile(4),
            second.start_profile(0),
            first.stop_profile(),
            return_exceptions=True,
        )
        # Profiling is off in this engine: each request gets the matching error.
        assert [getattr(answer, "code", None) for answer in answers] == [
            *("profiling_off", "profiling_off", "profile_not_running"),
        ]
        (stream,) = second.submit(make_requests(1))
        assert (await collect(stream))[-1].finish_reason is not None

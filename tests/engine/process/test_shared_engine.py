"""Several clients of one engine process: they are independent, except for the engine's death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from engine.errors import EngineDead, InvalidParameter, RequestFailed
from engine.shared import SharedClient
from engine.supervisor import EngineSupervisor
from engine.types import EngineOutput, Request
from tests.engine import fakes
from tests.engine.process.test_clients import MAX_LEN, collect, make_requests, tokens_of, until


class Shared:
    """An engine process and two clients of it."""

    def __init__(self, path: Path, **options: object) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.clients = [SharedClient(str(path)) for _ in range(2)]
        self.supervisor = EngineSupervisor(
            fakes.make_config(json.dumps(options)),
            runner="tests.engine.fakes:load",
            listener=self.listener,
            on_death=lambda error: [client.give_up(error) for client in self.clients],
        )


@asynccontextmanager
async def shared_engine(path: Path, **options: object) -> AsyncIterator[Shared]:
    shared = Shared(path / "engine", **options)
    starting = [asyncio.create_task(client.start()) for client in shared.clients]
    info = await shared.supervisor.start()
    assert await asyncio.gather(*starting) == [info, info]
    try:
        yield shared
    finally:
        for client in shared.clients:
            await client.close()
        await shared.supervisor.close()
        shared.listener.close()


def own_requests(number: int, count: int, *args, **fields) -> list[Request]:
    return [
        msgspec.structs.replace(request, id=f"{number}-{request.id}")
        for request in make_requests(count, *args, **fields)
    ]


def check(requests: list[Request], outputs: list) -> None:
    for request, told in zip(requests, outputs, strict=True):
        text = (tokens_of(told), told[-1].finish_reason)
        assert text == fakes.expected_output(request, MAX_LEN)


async def test_each_client_gets_its_own_and_the_steps_are_told_once(tmp_path: Path) -> None:
    async with shared_engine(tmp_path) as shared:
        heard: list[EngineOutput] = []
        for client in shared.clients:
            client.on_output(heard.append)
        asked = [own_requests(n, 6, logprobs=0, prompt_logprobs=0) for n in range(2)]
        streams = [
            client.submit(requests) for client, requests in zip(shared.clients, asked, strict=True)
        ]
        for requests, own in zip(asked, streams, strict=True):
            outputs = await asyncio.gather(*map(collect, own))
            check(requests, outputs)
            for request, told in zip(requests, outputs, strict=True):
                assert told[-1].timings is not None
                entries = [entry.token_id for output in told for entry in output.logprobs or ()]
                assert entries == tokens_of(told)
                assert sum(len(output.prompt_logprobs) for output in told) == 3, request.id
        newest = max(shared.clients, key=lambda client: client.stats_s).stats
        assert (newest.num_running, newest.blocks.held) == (0, 0)
        # All prompts and outputs but each one's last token were computed, and each step counted
        # once.
        computed = sum(3 + len(fakes.expected_output(r, MAX_LEN)[0]) for own in asked for r in own)
        cached = newest.prefix_cache_hits
        assert sum(output.stats.step_tokens for output in heard) == computed - cached


async def test_a_refusal_is_told_to_who_asked(tmp_path: Path) -> None:
    async with shared_engine(tmp_path) as shared:
        first, second = shared.clients
        (good,) = own_requests(1, 1)
        (bad,) = own_requests(2, 1)
        bad = msgspec.structs.replace(bad, prompt_token_ids=(99,))
        (fine,), (refused,) = first.submit([good]), second.submit([bad])
        with pytest.raises(InvalidParameter):
            await refused.next()
        check([good], [await collect(fine)])


async def test_a_client_that_goes_takes_only_its_own_along(tmp_path: Path) -> None:
    async with shared_engine(tmp_path, step_s=0.002) as shared:
        leaving, staying = shared.clients
        requests = own_requests(1, 4, 150, ignore_eos=True)
        readers = [asyncio.create_task(collect(s)) for s in staying.submit(requests)]
        gone = leaving.submit(own_requests(0, 4, 190, ignore_eos=True))
        await gone[0].next()
        # The order of requests is random, and no event signals that all are running.
        while max(staying.stats.num_running, leaving.stats.num_running) < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await leaving.close()
        with pytest.raises(EngineDead):
            await collect(gone[0])  # received output can still be read
        check(requests, await asyncio.gather(*readers))
        assert (staying.stats.num_running, staying.stats.blocks.held) == (0, 0)
        assert staying.num_resumed == 0


async def test_streams_of_all_clients_outlive_the_engine(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    async with shared_engine(tmp_path, step_s=0.002) as shared:
        asked = [own_requests(n, 5, 80, ignore_eos=True) for n in range(2)]
        readers = [
            asyncio.create_task(collect(stream))
            for client, requests in zip(shared.clients, asked, strict=True)
            for stream in client.submit(requests)
        ]
        enough = asyncio.Event()
        shared.clients[0].on_output(lambda output: enough.set())
        await enough.wait()
        assert shared.supervisor.pid is not None
        os.kill(shared.supervisor.pid, signal.SIGKILL)
        check([*asked[0], *asked[1]], await asyncio.gather(*readers))
        assert shared.supervisor.num_restarts == 1
        assert [client.num_resumed for client in shared.clients] == [5, 5]
        assert all(client.alive for client in shared.clients)


async def test_an_engine_given_up_ends_the_streams_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("engine.suspects.MAX_FRUITLESS", 10)  # whatever the requests are
    async with shared_engine(tmp_path, kill="0-r1") as shared:
        streams = [
            *shared.clients[0].submit(own_requests(0, 2)),
            *shared.clients[1].submit(own_requests(1, 2, 150, ignore_eos=True)),
        ]
        for stream in streams:
            with pytest.raises(EngineDead, match="keeps dying"):
                await collect(stream)
        for client in shared.clients:
            assert client.dead
            with pytest.raises(EngineDead, match="keeps dying"):
                client.submit(own_requests(2, 1))


async def test_neighbours_of_a_request_that_kills_engines_go_on_in_all_clients(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    async with shared_engine(tmp_path, kill="0-r1", step_s=0.001) as shared:
        first, second = shared.clients
        others = own_requests(1, 6, 40, ignore_eos=True)[3:]
        streams = second.submit(others)
        await streams[0].next()
        asked = own_requests(0, 3, 40, ignore_eos=True)
        good, poison, fine = first.submit(asked)
        with pytest.raises(RequestFailed, match="died too often"):
            await collect(poison)
        check([asked[0], asked[2]], [await collect(stream) for stream in (good, fine)])
        check(others[1:], [await collect(stream) for stream in streams[1:]])
        assert (await collect(streams[0]))[-1].finish_reason == "length"
        assert shared.supervisor.num_restarts == 2


async def test_who_loses_its_connection_alone_suspects_none_of_its_requests(
    tmp_path: Path,
) -> None:
    """The engine hangs up on a client that does not read, and has not died."""
    async with shared_engine(tmp_path, step_s=0.002) as shared:
        client = shared.clients[0]
        requests = own_requests(0, 3, 60, ignore_eos=True)
        first, *others = client.submit(requests)
        told: list[int] = []
        for _ in range(3):
            told += (await first.next()).token_ids
            link = client._link
            assert link is not None
            link.close()
            await until(lambda link=link: client._link is not link and client.alive)
        told += tokens_of(await collect(first))
        assert told == fakes.expected_output(requests[0], MAX_LEN)[0]
        check(requests[1:], [await collect(stream) for stream in others])
        assert shared.supervisor.num_restarts == 0


async def test_nonsense_from_one_client_is_that_clients_end(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    async with shared_engine(tmp_path) as shared:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "engine"))
        writer.write(b"\xff" * 64)
        while await reader.read(65536):  # the greeting, then the end
            pass
        writer.close()
        (request,) = own_requests(0, 1)
        check([request], [await collect(shared.clients[0].submit([request])[0])])

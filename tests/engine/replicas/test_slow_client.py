"""Engines hang up on a client that does not read; none of its requests is to blame for that."""

from __future__ import annotations

import asyncio
import queue
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine import hub as hub_module
from engine.frames import Abort, Submit
from engine.hub import ClientHub
from engine.replicas.client import ReplicaClient
from engine.shared import SharedClient
from engine.sleep_controller import ControlCall
from engine.streams import Stream
from engine.types import EngineOutput, FinishReason, Request
from tests.engine.fakes import make_info
from tests.engine.process.test_clients import collect, tokens_of, until

LONG = "r" * 100_000  # an id, so that a few outputs fill the connection's buffers


class Engine:
    """The hub of an engine that does only what a test says."""

    def __init__(self, path: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self._commands: queue.SimpleQueue[Submit | Abort | ControlCall] = queue.SimpleQueue()
        self.hub = ClientHub(self.listener, make_info(64, 4, 100))
        self.hub.start(self._commands.put)
        self.client = SharedClient(str(path))
        self._live: set[str] = set()

    @property
    def live(self) -> list[str]:
        """The requests that it has now."""
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, Submit):
                self._live |= {request.id for request in command.requests}
            elif isinstance(command, Abort):
                self._live -= set(command.ids)
                self.hub.emit(rows(command.ids, "abort"))
        return sorted(self._live)

    async def begin_and_hang_up(self) -> None:
        """Begin all requests, and send their client too much while it does not read."""
        link, ids = self.client._link, self.live
        assert link is not None
        assert link._transport is not None
        self.hub.begin(ids, [])
        link._transport.pause_reading()

        def fill() -> None:
            while self.live:
                self.hub.emit(rows(ids))

        await asyncio.to_thread(fill)
        link._transport.resume_reading()
        await until(lambda: self.client._link is not link and self.client.alive)


def rows(ids: Sequence[str], reason: FinishReason | None = None) -> EngineOutput:
    """An output without a token."""
    columns = ((),) * len(ids), (reason,) * len(ids)
    return EngineOutput(ids=tuple(ids), token_ids=columns[0], finish_reasons=columns[1])


@asynccontextmanager
async def two_engines(directory: Path) -> AsyncIterator[tuple[ReplicaClient, list[Engine]]]:
    engines = [Engine(directory / str(number)) for number in range(2)]
    client = ReplicaClient([engine.client for engine in engines])
    await client.start()
    try:
        yield client, engines
    finally:
        await client.close()
        for engine in engines:
            engine.listener.close()


async def test_a_request_outlives_any_number_of_lost_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_SEND_TIMEOUT_S", 0.05)
    async with two_engines(tmp_path) as (client, engines):
        (stream,) = client.submit([Request(id=LONG, prompt_token_ids=(1, 2, 3))])
        assert isinstance(stream, Stream)
        for _ in range(3):
            await until(lambda: any(engine.live for engine in engines))
            (busy,) = (engine for engine in engines if engine.live)
            await busy.begin_and_hang_up()
            assert not stream.is_suspect
        await until(lambda: any(engine.live for engine in engines))
        (busy,) = (engine for engine in engines if engine.live)
        busy.hub.emit(EngineOutput(ids=(LONG,), token_ids=((5,),), finish_reasons=("length",)))
        outputs = await collect(stream)
        assert (tokens_of(outputs), outputs[-1].finish_reason) == ([5], "length")

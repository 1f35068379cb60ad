"""An engine process that is stopped, by a debugger or in a frozen container, is detected."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine import link
from engine.remote import RemoteClient
from tests.engine import fakes
from tests.engine.process.test_clients import (
    MAX_LEN,
    collect,
    make_requests,
    subprocess_client,
    tokens_of,
    until,
)
from tests.engine.process.test_shared_engine import shared_engine


@asynccontextmanager
async def alone(directory: Path, **options: object) -> AsyncIterator[tuple[RemoteClient, int]]:
    client = subprocess_client(**options)
    await client.start()
    try:
        assert client.pid is not None
        yield client, client.pid
    finally:
        await client.close()


@asynccontextmanager
async def shared(directory: Path, **options: object) -> AsyncIterator[tuple[RemoteClient, int]]:
    async with shared_engine(directory, **options) as both:
        assert both.supervisor.pid is not None
        yield both.clients[0], both.supervisor.pid


@pytest.mark.parametrize("engine", [alone, shared])
async def test_a_stopped_process_does_not_respond_until_it_goes_on(
    engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_PING_AFTER_S", 0.05)
    monkeypatch.setattr(link, "_PONG_TIMEOUT_S", 1.0)
    async with engine(tmp_path) as (client, pid):
        assert client.responsive
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(lambda: not client.responsive)
            assert client.alive  # new requests wait
            (request,) = make_requests(1)
            (stream,) = client.submit([request])
        finally:
            os.kill(pid, signal.SIGCONT)
        outputs = await collect(stream)
        text = (tokens_of(outputs), outputs[-1].finish_reason)
        assert text == fakes.expected_output(request, MAX_LEN)
        assert client.responsive


async def test_a_long_step_is_no_stopped_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_PING_AFTER_S", 0.05)
    async with alone(tmp_path, step_s=0.5) as (client, _):
        told: list[float | None] = []
        heard = link.EngineLink.data_received

        def note(self: link.EngineLink, data: bytes) -> None:
            told.append(self._pinged_s)
            heard(self, data)

        monkeypatch.setattr(link.EngineLink, "data_received", note)
        (stream,) = client.submit(make_requests(1, 2, ignore_eos=True))
        await collect(stream)
        # Several answers came during the steps, to requests made meanwhile.
        assert len([asked for asked in told if asked is not None]) > 4

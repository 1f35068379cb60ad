"""Several API workers before one engine: deaths, their effects, and what is counted."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engine.paths import default_model_dir
from engine.stats import EngineStats
from server.metrics import MetricValues, merge
from server.settings import Settings
from tests.server.test_streams import events_of
from tests.servers import MODEL, ROOT, Server, running_server

COMPLETIONS = "/v1/completions"
FLAGS = ("--api-workers", "2", "--load-format", "stub", "--stub-step-ms", "5")
NUM_STREAMS = 24


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("workers") / "log", *FLAGS) as server:
        wait_for_workers(server)
        yield server


def workers_of(server: Server) -> list[psutil.Process]:
    """The server's API workers, by their start."""
    return server.processes("server.workers.worker")


def connections(worker: psutil.Process) -> set[int]:
    """The client ports of a worker's connections."""
    established = worker.net_connections("tcp")
    return {c.raddr.port for c in established if c.status == psutil.CONN_ESTABLISHED}


def wait_for_workers(server: Server, limit_s: float = 60.0) -> None:
    """Wait until both workers accept, respond, and have been reached over separate connections."""
    deadline_s = time.monotonic() + limit_s
    served: set[int] = set()
    while len(served) < 2:
        assert time.monotonic() < deadline_s, server.tail()
        with server.connect() as sock:
            sock.sendall(b"GET /ready HTTP/1.1\r\nHost: test\r\n\r\n")
            port = sock.getsockname()[1]
            if b" 200 " in sock.recv(4096):
                here = workers_of(server)
                served |= {worker.pid for worker in here if port in connections(worker)}
        served &= {worker.pid for worker in workers_of(server)}


def body(index: int, max_tokens: int = 150) -> dict[str, Any]:
    fields = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    prompt = f"Item {index}"
    return {"model": MODEL, "prompt": prompt, "seed": index, "max_tokens": max_tokens, **fields}


class Streaming:
    """Streams in flight, each on its own connection."""

    def __init__(self, client: httpx.AsyncClient, count: int) -> None:
        self.begun = asyncio.Event()
        self._num_begun = 0
        self._count = count
        self.tasks = [asyncio.create_task(self._run(client, i)) for i in range(count)]

    async def _run(self, client: httpx.AsyncClient, index: int) -> str | None:
        """The text of a whole stream; None if it was cut off."""
        raw = b""
        try:
            async with client.stream("POST", COMPLETIONS, json=body(index)) as answer:
                assert answer.status_code == 200
                async for data in answer.aiter_raw():
                    self._num_begun += not raw
                    raw += data
                    if self._num_begun == self._count:
                        self.begun.set()
        except httpx.RemoteProtocolError:
            return None
        *chunks, last = events_of(raw)
        assert last["usage"]["completion_tokens"] == 150
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@asynccontextmanager
async def streaming(server: Server, count: int = NUM_STREAMS) -> AsyncIterator[Streaming]:
    limits = httpx.Limits(max_connections=count, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        streams = Streaming(client, count)
        await streams.begun.wait()
        yield streams


@pytest.fixture(scope="module")
def expected(workers: Server) -> list[str]:
    """The text of each stream, without faults."""

    async def run() -> list[Any]:
        async with streaming(workers) as streams:
            return await asyncio.gather(*streams.tasks)

    texts = asyncio.run(run())
    assert len(set(texts)) == NUM_STREAMS
    return texts


async def test_a_killed_engine_costs_no_worker_a_token(
    workers: Server, expected: list[str]
) -> None:
    before = workers.wait_idle()
    async with streaming(workers) as streams:
        for worker in workers_of(workers):
            assert connections(worker), "the streams are to be spread over both"
        (engine,) = workers.engines()
        engine.send_signal(signal.SIGKILL)
        assert await asyncio.gather(*streams.tasks) == expected
    after = workers.wait_idle()
    assert after["engine_restarts_total"] == before["engine_restarts_total"] + 1
    assert after["requests_resumed_total"] == before["requests_resumed_total"] + NUM_STREAMS
    assert after["generation_tokens_total"] == before["generation_tokens_total"] + 24 * 150
    assert after["request_failed_total"] == 0


async def test_a_killed_worker_is_replaced_and_the_other_does_not_notice(
    workers: Server, expected: list[str]
) -> None:
    before = workers.wait_idle()
    (engine,) = workers.engines()
    async with streaming(workers) as streams:
        victim, _ = workers_of(workers)
        cut = len(connections(victim) - {workers.port})
        victim.send_signal(signal.SIGKILL)
        texts = await asyncio.gather(*streams.tasks)
    whole = [index for index, text in enumerate(texts) if text is not None]
    assert 0 < len(whole) < NUM_STREAMS
    assert [texts[index] for index in whole] == [expected[index] for index in whole]
    assert NUM_STREAMS - len(whole) >= min(cut, 1)
    wait_for_workers(workers)
    assert victim.pid not in {w.pid for w in workers_of(workers)}
    # Its requests have ended with it, the engine is alive, and no counter has decreased.
    after = workers.wait_idle()
    assert workers.engines() == [engine]
    assert after["kv_blocks_free"] == before["kv_blocks_free"]
    told = ("generation_tokens_total", "http_requests_total", "request_success_total")
    assert all(after[name] >= before[name] for name in told)
    assert after["request_success_total"] >= before["request_success_total"] + len(whole)
    # Each that was accepted has ended, and is counted once.
    ends = ("request_success_total", "request_failed_total", "request_aborted_total")
    assert after["request_prompt_tokens_count"] == sum(after.get(name, 0) for name in ends)


async def test_metrics_are_the_whole_servers_whichever_worker_answers(workers: Server) -> None:
    before = workers.wait_idle()
    async with streaming(workers) as streams:
        seen = workers.metrics()
        assert seen["num_requests_running"] == NUM_STREAMS
        await asyncio.gather(*streams.tasks)
    workers.wait_idle()
    for _ in range(6):  # separate connections, over both workers
        async with httpx.AsyncClient(base_url=workers.url) as client:
            text = (await client.get("/metrics")).text
        told = dict(line.rsplit(" ", 1) for line in text.splitlines() if "#" not in line)
        labels = 'engine="0",model_name="quire-demo"'
        generated = float(told[f"quire:generation_tokens_total{{{labels}}}"])
        assert generated == before["generation_tokens_total"] + NUM_STREAMS * 150
        # Every step was counted once: a computed token is a prompt or output token, except the last
        # one.
        computed = float(told[f"quire:iteration_tokens_total_sum{{{labels}}}"])
        prompts = float(told[f"quire:prompt_tokens_total{{{labels}}}"])
        assert computed <= generated + prompts + 24 * 200  # resumed ones were computed again


def test_sigterm_drains_all_workers(tmp_path: Path) -> None:
    async def run(server: Server) -> list[str | None]:
        async with streaming(server) as streams:
            server.process.send_signal(signal.SIGTERM)
            return list(await asyncio.gather(*streams.tasks))

    with running_server(tmp_path / "log", *FLAGS) as server:
        wait_for_workers(server)
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert all(asyncio.run(run(server)))
        assert server.process.wait(30) == 0
        assert psutil.wait_procs(family, timeout=10)[1] == []


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    with running_server(tmp_path / "log", *FLAGS) as server:
        wait_for_workers(server)
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert len(family) >= 3
        server.process.kill()
        assert psutil.wait_procs(family, timeout=10)[1] == []
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", server.port))


def serve_to_end(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", "serve", *arguments, "--log-level", "error", *FLAGS]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken", ["config.json", pytest.param("tokenizer.json", marks=pytest.mark.slow)]
)
def test_a_model_that_cannot_be_loaded_ends_all_with_one_line(broken: str, tmp_path: Path) -> None:
    """The first is read by the engine process, the second by the workers."""
    model = tmp_path / "model"
    shutil.copytree(default_model_dir(), model)
    os.truncate(model / broken, (model / broken).stat().st_size // 2)
    done = serve_to_end(str(model), "--port", "0")
    assert done.returncode == 1, done.stderr
    problems = [line for line in done.stderr.splitlines() if "quire serve:" in line]
    assert len(problems) == 1
    assert broken in problems[0]
    assert "Traceback" not in done.stderr


def test_a_shared_port_is_not_shared_with_another_server(workers: Server) -> None:
    done = serve_to_end("--port", str(workers.port))
    assert done.returncode == 1
    assert "address already in use" in done.stderr


def test_settings_reach_a_worker_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(api_keys=["a"], api_workers=2, chat_template=Path("t"), port=7)
    monkeypatch.setenv("QUIRE_PORT", "8")
    assert Settings.from_json(settings.model_dump_json()) == settings


def test_merged_numbers_are_sums_and_the_newest_snapshot() -> None:
    first, second = MetricValues.zero(), MetricValues.zero()
    first.count("request_success", "stop")
    second.count("request_success", "stop")
    second.count("request_success", "length")
    first.http["GET", "/x", "200"] = 2
    first.observe("request_params_n", 1)
    second.observe("request_params_n", 7, 2)
    first.engines[0].stats_s, second.engines[0].stats_s = 9.0, 8.0
    first.engines[0].stats = EngineStats(num_running=3)
    total = merge([first, second])
    assert total.labelled["request_success"] == {"stop": 2, "length": 1}
    assert total.http == {("GET", "/x", "200"): 2}
    assert total.histograms["request_params_n"].total == 15
    assert sum(total.histograms["request_params_n"].counts) == 3
    assert total.engines[0].stats.num_running == 3
    once = merge([first]).labelled["request_success"]
    assert once == {"stop": 1, "length": 0}, "parts are not modified"

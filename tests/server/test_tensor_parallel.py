"""The embedded model on two ranks, over HTTP: its answers, and the death of a rank."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.servers import Server, running_server

FLAGS = ("--tensor-parallel-size", "2", "--dtype", "float32", "--enable-sleep-mode")
QUESTIONS = ("What is the capital of France?", "What is paged attention?", "Tell me a story.")


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("ranks") / "server.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(log.parent))
        with running_server(log, *FLAGS) as running:
            yield running


@pytest.fixture(scope="module")
def lone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A single process with the same dtype, which auto need not choose here."""
    log = tmp_path_factory.mktemp("alone") / "server.log"
    with running_server(log, "--dtype", "float32") as running:
        yield running


def ranks(server: Server) -> list[psutil.Process]:
    """The engine processes, and the ranks they have started."""
    return server.processes("engine.worker", "engine.parallel.follower")


def text_of(server: Server, question: str) -> str:
    answer = server.chat(question, max_tokens=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_two_ranks_answer_as_one(lone_server: Server, shared_server: Server) -> None:
    assert len(ranks(shared_server)) == 2
    for question in QUESTIONS:
        assert text_of(shared_server, question) == text_of(lone_server, question)
    told = shared_server.log.read_text()
    assert "tensor parallel: 2 ranks" in told


def test_ranks_sleep_and_wake(shared_server: Server) -> None:
    expected = text_of(shared_server, QUESTIONS[0])
    processes = ranks(shared_server)
    for level in (1, 2):
        slept = shared_server.post(f"/sleep?level={level}", None)
        assert slept.json() == {"is_sleeping": True, "activity": "asleep"}, slept.text
        assert shared_server.chat(QUESTIONS[0], max_tokens=60).status_code == 503
        assert shared_server.post("/wake_up", None).status_code == 200
        assert text_of(shared_server, QUESTIONS[0]) == expected
    reloaded = shared_server.post("/reload_weights", {})
    assert (reloaded.status_code, reloaded.json()["generation"]) == (200, 1), reloaded.text
    assert text_of(shared_server, QUESTIONS[0]) == expected
    assert ranks(shared_server) == processes, "they are the same that began"


@pytest.mark.slow
def test_a_rank_that_dies_asleep_is_replaced_by_an_engine_that_is_awake(
    shared_server: Server,
) -> None:
    assert shared_server.post("/sleep?level=2", None).status_code == 200
    _, follower = ranks(shared_server)
    follower.kill()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and shared_server.get("/ready").status_code != 200:
        time.sleep(0.05)
    assert shared_server.get("/is_sleeping").json() == {"is_sleeping": False, "activity": "serving"}
    assert text_of(shared_server, QUESTIONS[0])
    assert len(ranks(shared_server)) == 2


@pytest.mark.slow
def test_a_stream_outlives_a_rank(shared_server: Server) -> None:
    body = {"max_tokens": 200, "ignore_eos": True, "stream": True}
    expected = shared_server.chat(QUESTIONS[2], **{**body, "stream": False}).json()
    _, follower = ranks(shared_server)
    messages = [{"role": "user", "content": QUESTIONS[2]}]
    body |= {"model": "quire-demo", "messages": messages, "temperature": 0}
    got, killed = "", False
    url = shared_server.url + "/v1/chat/completions"
    with shared_server._client.stream("POST", url, json=body, timeout=120) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            got += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            if len(got) > 40 and not killed:
                follower.kill()
                killed = True
    assert killed
    assert got == expected["choices"][0]["message"]["content"]
    assert follower.pid not in [process.pid for process in ranks(shared_server)]
    assert "rank 1 (process" in shared_server.log.read_text()


@pytest.mark.slow
def test_no_rank_is_left_behind_by_a_killed_server(shared_server: Server) -> None:
    end_and_see(shared_server, signal.SIGKILL)  # the last test to use it
    assert not list(shared_server.log.parent.glob("quire-ranks-*"))  # nor a directory


@pytest.mark.slow
def test_no_rank_is_left_behind_by_an_ended_server(tmp_path: Path) -> None:
    with running_server(tmp_path / "server.log", *FLAGS) as server:
        end_and_see(server, signal.SIGTERM)


def end_and_see(server: Server, how: signal.Signals, num_ranks: int = 2) -> None:
    processes = ranks(server)
    assert len(processes) == num_ranks
    os.kill(server.process.pid, how)
    server.process.wait(60)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and any(process.is_running() for process in processes):
        time.sleep(0.05)
    assert not [process for process in processes if process.is_running()]

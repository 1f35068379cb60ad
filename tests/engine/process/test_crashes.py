"""The engine process or its parent dies: the effect on everything else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from engine import supervisor
from engine.child import Child, describe_exit
from engine.errors import EngineDead, ModelLoadError, RequestFailed
from engine.frames import Configure, FrameReader, Loading, encode, receive
from engine.process import SubprocessClient
from engine.requests import fan_out
from engine.stats import EngineStats
from engine.types import RequestOutput, SamplingParams
from tests.engine import fakes
from tests.engine.process.test_clients import (
    MAX_LEN,
    collect,
    inline_client,
    make_requests,
    subprocess_client,
    tokens_of,
    until,
)

ROOT = Path(__file__).resolve().parents[3]


async def kill_after(client: SubprocessClient, num_tokens: int) -> None:
    """Kill the engine once ``num_tokens`` more have arrived."""
    enough, count = asyncio.Event(), 0

    def listen(output) -> None:
        nonlocal count
        count += sum(map(len, output.token_ids))
        if count >= num_tokens:
            enough.set()

    client.on_output(listen)
    await enough.wait()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)


async def test_streams_outlive_the_engine(capfd: pytest.CaptureFixture) -> None:
    client = subprocess_client(step_s=0.002, num_blocks=500)
    await client.start()
    first_pid = client.pid
    requests = make_requests(6, 190, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    requests += fan_out("many", (1, 2, 3, 4, 5), SamplingParams(n=3, seed=5, max_tokens=190))
    readers = [asyncio.create_task(collect(stream)) for stream in client.submit(requests)]
    doomed, aborted = make_requests(8, 150, ignore_eos=True)[6:]
    (stream,) = client.submit([aborted])
    await kill_after(client, 100)
    await until(lambda: not client.alive)
    stream.abort()  # while there is no engine to notify
    with pytest.raises(EngineDead, match="restarted"):
        client.submit([doomed])
    await until(lambda: client.alive)
    await kill_after(client, 900)  # by then each has more than 16, and none is suspected any more
    for request, outputs in zip(requests, await asyncio.gather(*readers), strict=True):
        text = (tokens_of(outputs), outputs[-1].finish_reason)
        assert text == fakes.expected_output(request, MAX_LEN)
        check_told_once(request.sampling, outputs, len(request.prompt_token_ids))
    assert (client.num_restarts, client.dead) == (2, False)
    assert client.num_resumed >= 9 + 1
    assert client.pid != first_pid
    assert (client.stats.num_running, client.stats.blocks.held) == (0, 0)
    await client.close()


async def test_statistics_are_those_of_an_engine_that_lives(capfd: pytest.CaptureFixture) -> None:
    client = subprocess_client(step_s=0.002, num_blocks=500)
    await client.start()
    (before,) = client.submit(make_requests(1))
    await collect(before)
    assert client.stats.num_steps
    pid, restarts = client.pid, client.num_restarts
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: client.stats == EngineStats())
    await until(lambda: client.num_restarts > restarts and client.alive)
    assert client.stats == EngineStats(), "the next has done nothing yet"
    (stream,) = client.submit(make_requests(1, 190, ignore_eos=True))
    await kill_after(client, 20)
    await until(lambda: client.stats == EngineStats(num_waiting=1))
    await collect(stream)
    assert client.stats.num_steps
    await client.close()
    assert client.stats == EngineStats()


async def test_an_engine_that_replaces_another_is_on_the_same_kind_of_device(
    capfd: pytest.CaptureFixture,
) -> None:
    """Left to choose, it would take the CPU if the GPU is what was lost."""
    client = subprocess_client(tells_device=True)
    info = await client.start()
    assert (info.architecture, info.device) == ("auto", "cpu")
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    await until(lambda: client.num_restarts == 1 and client.alive)
    assert client.info.architecture == "cpu"
    await client.close()


def check_told_once(sampling: SamplingParams, outputs: list[RequestOutput], prompt: int) -> None:
    assert sum(output.num_cached_tokens is not None for output in outputs) == 1
    timings = outputs[-1].timings
    assert timings is not None
    assert timings.first_token_s <= timings.finished_s
    if sampling.logprobs is not None:
        positions = [-p.logprob for output in outputs for p in output.prompt_logprobs]
        assert positions == list(range(1, prompt))
        ends = [-p.logprob for output in outputs for p in output.logprobs or ()]
        assert ends == list(range(prompt, prompt + len(ends)))
        assert len(ends) == len(tokens_of(outputs))


async def test_a_step_that_hangs_is_ended_and_its_requests_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    client = subprocess_client(hang_unless=str(tmp_path / "flag"), step_timeout_s=4.0)
    await client.start()
    requests = make_requests(3)
    streams = client.submit(requests)
    for request, stream in zip(requests, streams, strict=True):
        outputs = await collect(stream)
        text = (tokens_of(outputs), outputs[-1].finish_reason)
        assert text == fakes.expected_output(request, MAX_LEN)
    assert (client.num_restarts, client.num_resumed) == (1, 3)
    assert "in fault" in capfd.readouterr().err  # where it hung
    await asyncio.sleep(4.2)  # an idle engine is not mistaken for a hung one
    assert client.alive
    await client.close()


async def test_a_request_that_every_engine_dies_with_is_given_up_and_the_engine_is_not(
    capfd: pytest.CaptureFixture,
) -> None:
    client = subprocess_client(kill="r1")
    await client.start()
    (stream,) = client.submit(make_requests(2)[1:])
    with pytest.raises(RequestFailed, match="died too often"):
        await collect(stream)
    assert client.num_restarts == 2
    request = make_requests(1)[0]
    (stream,) = client.submit([request])
    outputs = await collect(stream)
    assert tokens_of(outputs) == fakes.expected_output(request, MAX_LEN)[0]
    await client.close()


async def test_an_engine_that_keeps_dying_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("engine.suspects.MAX_FRUITLESS", 10)  # whatever the requests are
    client = subprocess_client(kill="r1")
    await client.start()
    streams = client.submit(make_requests(2))
    for stream in streams:
        with pytest.raises(EngineDead, match="keeps dying"):
            await collect(stream)
    assert client.dead
    assert not client.alive
    assert client.num_restarts == supervisor.MAX_CRASHES - 1
    with pytest.raises(EngineDead, match="keeps dying"):
        client.submit(make_requests(1))
    await client.close()


async def test_an_engine_that_does_not_come_back_is_given_up(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    client = subprocess_client(kill="r0", die_unless_first=str(tmp_path / "flag"))
    await client.start()
    (stream,) = client.submit(make_requests(1))
    with pytest.raises(EngineDead, match="keeps dying"):
        await stream.next()
    assert (client.num_restarts, client.dead) == (0, True)
    await client.close()


async def test_a_system_that_refuses_a_process_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    client = subprocess_client(step_s=0.002)
    await client.start()
    children = iter([OSError("Resource temporarily unavailable"), Child])

    def make_child(module: str) -> Child:
        result = next(children)
        if isinstance(result, OSError):
            raise result
        return result(module)

    monkeypatch.setattr(supervisor, "Child", make_child)
    monkeypatch.setattr(supervisor, "SPAWN_PAUSE_S", 0.01)
    (request,) = make_requests(1)
    (stream,) = client.submit([request])
    await kill_after(client, 1)
    assert tokens_of(await collect(stream)) == fakes.expected_output(request, MAX_LEN)[0]
    assert client.num_restarts == 1
    await client.close()


async def test_a_model_that_cannot_be_loaded_is_told_in_one_line() -> None:
    client = subprocess_client(refuse="config.json: no such family")
    progress: list[tuple[float, str]] = []
    with pytest.raises(ModelLoadError, match=r"^config.json: no such family$"):
        await client.start(lambda fraction, what: progress.append((fraction, what)))
    assert progress == [(0.5, "half of nothing")]
    assert client.dead
    await client.close()


async def test_an_engine_killed_while_it_loads_is_told_with_its_signal() -> None:
    client = subprocess_client(load_s=60)
    starting = asyncio.create_task(client.start())
    await until(lambda: client.pid is not None)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match=r"while it was loading: SIGKILL \(is there enough memory"):
        await starting
    await client.close()


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit status 0"), (1, "exit status 1"), (-signal.SIGSEGV, "SIGSEGV"), (-99, "signal 99")],
)
def test_an_exit_code_is_told_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


async def test_an_inline_engine_closed_while_it_loads_ends_when_it_has() -> None:
    client = inline_client(load_s=0.05)
    starting = asyncio.create_task(client.start())
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(EngineDead, match="closed"):
        await starting
    assert not client.alive


async def test_closing_does_not_wait_for_the_load() -> None:
    client = subprocess_client(load_s=60)
    starting = asyncio.create_task(client.start())
    await until(lambda: client.pid is not None)
    process = psutil.Process(client.pid)
    await client.close()
    assert not process.is_running()
    with pytest.raises(EngineDead):
        await starting


async def test_an_interrupt_is_the_parents_to_decide_upon() -> None:
    client = subprocess_client()
    client.spawn()
    pid = client.pid
    assert pid is not None
    await client.start()
    assert os.getpgid(pid) != os.getpgid(0), "Ctrl-C at the terminal must not reach the engine"
    os.kill(pid, signal.SIGINT)
    (request,) = make_requests(1)
    (stream,) = client.submit([request])
    assert tokens_of(await collect(stream)) == fakes.expected_output(request, MAX_LEN)[0]
    assert client.pid == pid
    process = psutil.Process(pid)
    await client.close()
    assert not process.is_running()


PARENT = """
import asyncio, sys, threading
from tests.engine.process.test_clients import make_requests, subprocess_client

def start_in_a_thread(client):  # the child must outlive the thread that made it
    thread = threading.Thread(target=client.spawn)
    thread.start()
    thread.join()

async def main():
    client = subprocess_client(step_s=60.0)
    if sys.argv[1] == "thread":
        start_in_a_thread(client)
    await client.start()
    client.submit(make_requests(1))
    await asyncio.sleep(0.1)
    print(client.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("starter", ["main", "thread"])
def test_the_engine_does_not_outlive_its_parent(starter: str) -> None:
    command = [sys.executable, "-c", PARENT, starter]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))  # by now in a step of a minute
        parent.kill()
    deadline_s = time.monotonic() + 10
    while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "the engine outlived its parent"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "data", [b"\xff" * 64, b"\x02\x00\x00\x00\x91\xc0", b""], ids=["length", "shape", "end"]
)
def test_a_worker_that_is_told_nonsense_ends(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "engine.worker", str(theirs.fileno())]
    with ours:
        worker = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), cwd=ROOT, stderr=subprocess.DEVNULL
        )
        theirs.close()
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        assert worker.wait(20) == 1


async def test_a_process_that_was_started_ahead_is_the_first_engine() -> None:
    child = Child("engine.worker", "--ahead")
    config = fakes.make_config(json.dumps({"step_s": 0.002}))
    client = SubprocessClient(config, runner="tests.engine.fakes:load", child=child)
    client.spawn()
    assert client.pid == child.pid
    await client.start()
    (request,) = make_requests(1, 60, ignore_eos=True)
    (stream,) = client.submit([request])
    outputs, _ = await asyncio.gather(collect(stream), kill_after(client, 5))
    assert tokens_of(outputs) == fakes.expected_output(request, MAX_LEN)[0]
    assert client.pid != child.pid
    await client.close()


@pytest.mark.parametrize("is_told", [False, True], ids=["waiting", "loading"])
def test_a_process_that_was_started_ahead_ends_with_its_parent(is_told: bool) -> None:
    child = Child("engine.worker", "--ahead")
    if is_told:
        config = fakes.make_config(json.dumps({"load_s": 60.0}))
        child.socket.sendall(encode(Configure(config, "tests.engine.fakes:load")))
        assert isinstance(receive(child.socket, FrameReader())[0], Loading)
    child.socket.close()
    assert child.process.wait(20) == (0 if is_told else 1)


def test_the_clients_side_imports_no_tensor_library() -> None:
    code = (
        "import sys, engine.process, engine.inline, engine.worker; "
        "bad = {'torch', 'numpy', 'transformers'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)

"""The embedded model on two nodes over HTTP: its answers, and the loss of either node.

Both nodes are one machine here, and talk over TCP.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from server.cli import main
from tests.engine.parallel.thread_nodes import free_port
from tests.servers import _ENV, ROOT, Server, _await_ready, running_server

QUESTIONS = ("What is the capital of France?", "What is paged attention?", "Tell me a story.")
LIMIT_S = 60.0


@dataclass
class Machines:
    """The common arguments of the nodes, and their logs."""

    home: Path
    flags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        secret = self.home / "secret"
        secret.write_text("a secret that nobody else has\n")
        self.flags = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--dtype", "float32"]
        self.flags += ["--master-port", str(free_port()), "--node-secret-file", str(secret)]
        self.flags += ["--tensor-parallel-size", "2", "--num-threads", "1"]
        self.flags += ["--num-gpu-blocks-override", "1024"]

    @contextmanager
    def second(self, *flags: str) -> Iterator[Node]:
        command = [sys.executable, "-m", "server", "serve", "--node-rank", "1", *self.flags, *flags]
        log = self.home / f"node-{time.monotonic_ns()}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=ROOT, env={**os.environ, **_ENV}
            )
        try:
            yield Node(process, log)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


@dataclass
class Node:
    process: subprocess.Popen[bytes]
    log: Path

    def ranks(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "engine.parallel.follower" in child.cmdline()]

    def wait_for(self, said: str) -> None:
        wait_until_said(self.log, said)


def wait_until_said(log: Path, said: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while said not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path)


def text_of(server: Server, question: str, **fields) -> str:
    answer = server.chat(question, max_tokens=60, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def wait_for_end_of(processes: list[psutil.Process]) -> None:
    gone, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
    assert gone or not processes
    assert not alive


@pytest.mark.slow
def test_two_machines_answer_as_one_and_a_stream_outlives_the_second(
    machines: Machines, tmp_path: Path
) -> None:
    with running_server(tmp_path / "alone.log", "--dtype", "float32") as alone:
        expected = [text_of(alone, question) for question in QUESTIONS]
        long = alone.chat(QUESTIONS[2], max_tokens=200, ignore_eos=True).json()
    with (
        machines.second() as second,
        running_server(tmp_path / "server.log", *machines.flags, wait=False) as server,
    ):
        _await_ready(server)
        assert len(second.ranks()) == 1
        assert [text_of(server, question) for question in QUESTIONS] == expected
        got = streamed_while(second, server, machines)
        assert got == long["choices"][0]["message"]["content"]
        assert "rank 1 (node 1, 127.0.0.1) ended" in server.log.read_text()


def streamed_while(second: Node, server: Server, machines: Machines) -> str:
    """A text during which ranks of the second node are lost.

    First one rank dies and is restarted there; then the whole node, and another replaces it.
    """
    messages = [{"role": "user", "content": QUESTIONS[2]}]
    body = {"max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 0}
    body |= {"model": "quire-demo", "messages": messages}
    url, got = server.url + "/v1/chat/completions", ""
    killed: list[psutil.Process] = []
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(server._client.stream("POST", url, json=body, timeout=120))
        third: Node | None = None
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                got += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            if len(got) > 40 and not killed:
                killed = second.ranks()
                killed[0].kill()
                wait_for_end_of(killed)
            if len(got) > 200 and second.process.poll() is None:
                ranks = second.ranks()
                assert ranks
                assert ranks != killed
                second.process.kill()
                wait_for_end_of(ranks)
                third = stack.enter_context(machines.second())
        assert third is not None
        assert len(third.ranks()) == 1
    return got


@pytest.mark.slow
def test_the_second_machine_waits_for_a_first_that_was_killed_and_holds_nothing(
    machines: Machines, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        flags = machines.flags
        server = stack.enter_context(running_server(tmp_path / "server.log", *flags, wait=False))
        wait_until_said(server.log, "waiting for node 1")  # within the second's time
        second = stack.enter_context(machines.second("--node-timeout-s", "3"))
        _await_ready(server)
        ranks = second.ranks()
        server.process.send_signal(signal.SIGKILL)
        wait_for_end_of(ranks)
        second.wait_for("waiting for node 0")
        assert second.process.wait(LIMIT_S) == 1
        last = second.log.read_text().splitlines()[-1]
        assert last.startswith("quire serve: node 0 did not come to 127.0.0.1:")


@pytest.mark.slow
def test_both_end_when_they_are_told_to(machines: Machines, tmp_path: Path) -> None:
    with (
        running_server(tmp_path / "server.log", *machines.flags, wait=False) as server,
        machines.second() as second,
    ):
        _await_ready(server)
        ranks = second.ranks()
        assert server.stop() == 0
        wait_for_end_of(ranks)
        second.wait_for("waiting for node 0")  # for the next one
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(LIMIT_S) == 0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--node-rank", "2"], "--node-rank 2: must be below --nnodes, 2"),
        (["--master-addr", "0.0.0.0"], "--master-addr 0.0.0.0: must be the address"),
        (["--data-parallel-size", "2"], "--data-parallel-size: not with --nnodes 2"),
        (["--tensor-parallel-size", "3"], "--nnodes 2: --tensor-parallel-size 3 cannot be divided"),
        (["--lora-dir", "."], "--lora-dir: adapters are not shared out to several machines"),
        (["--node-secret-file", "/dev/null"], "node_secret_file /dev/null: a secret has 16 bytes"),
    ],
)
def test_what_several_machines_cannot_do_is_refused_at_once(
    machines: Machines, capsys: pytest.CaptureFixture[str], flags: list[str], told: str
) -> None:
    assert main(["serve", "--port", "0", *machines.flags, *flags]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"quire serve: {told}")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "--nnodes 2 needs --master-addr"),
        (["--master-addr", "10.0.0.1"], "--nnodes 2 needs --node-secret-file"),
    ],
)
def test_what_several_machines_need_is_asked_for(
    capsys: pytest.CaptureFixture[str], flags: list[str], told: str
) -> None:
    assert main(["serve", "--nnodes", "2", "--tensor-parallel-size", "2", *flags]) == 1
    assert capsys.readouterr().err.startswith(f"quire serve: {told}")

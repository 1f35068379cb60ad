"""What a server tells of itself when it is asked by a signal."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.test_workers import children
from tests.servers import Server, http_post, running_server

STUB = ("--load-format", "stub")


@pytest.fixture(params=["alone", "workers"])
def server(request, tmp_path: Path) -> Iterator[Server]:
    workers = ("--api-workers", "2") if request.param == "workers" else ()
    with running_server(tmp_path / "log", *STUB, *workers) as running:
        yield running


def test_tasks_and_threads_are_told_on_sigusr1(server: Server) -> None:
    """A request whose body does not come is told by its id, and by what it waits for."""
    body = http_post("/v1/completions", b"{}" * 50, "X-Request-Id: the-slow-one")
    with server.connect() as sock:
        sock.sendall(body[:-10])
        told = ""
        for _ in range(200):
            server.process.send_signal(signal.SIGUSR1)
            time.sleep(0.1)
            told = server.log.read_text()
            if "request the-slow-one" in told and told.endswith(" tasks\n"):
                break
    assert "most recent call first" in told, "no thread is told"
    # Workers tell theirs at once, and their lines lie among each other's.
    who = re.search(r"(\[worker \d+\]|WARNING) .*request the-slow-one\n", told)
    assert who
    of_one = "".join(line for line in told.splitlines(keepends=True) if who[1] in line)
    _, _, path = of_one.partition("request the-slow-one\n")
    waits, _, _ = path.partition(": task")
    assert 0 < waits.find("in RequestContext.__call__") < waits.find("in BodyGuard.")
    assert "in RequestResponseCycle.receive" in waits
    assert server.get("/health").status_code == 200, "it serves on"
    expected = 2 if children(server, "server.workers.worker") else 1
    assert len(re.findall(r"these are all of \d+ tasks", told)) >= expected

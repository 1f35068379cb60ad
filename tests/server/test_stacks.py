"""The stacks that a server logs on a signal."""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.test_workers import workers_of
from tests.servers import Server, http_post, running_server

STUB = ("--load-format", "stub")


@pytest.fixture(params=["alone", "workers"])
def server(request, tmp_path: Path) -> Iterator[Server]:
    workers = ("--api-workers", "2") if request.param == "workers" else ()
    with running_server(tmp_path / "log", *STUB, *workers) as running:
        yield running


def test_tasks_and_threads_are_told_on_sigusr1(server: Server) -> None:
    """A request whose body does not arrive is listed by its id, with the await it is stuck in."""
    body = http_post("/v1/completions", b"{}" * 50, "X-Request-Id: the-slow-one")
    processes = 2 if workers_of(server) else 1
    told, waits = "", None
    with server.connect() as sock:
        sock.sendall(body[:-10])
        for _ in range(200):
            server.process.send_signal(signal.SIGUSR1)
            time.sleep(0.1)
            told = server.log.read_text()
            waits = _path_of("the-slow-one", told)
            whole = re.findall(r"WARNING (.*)these are all of \d+ tasks\n", told)
            if waits and len(set(whole)) == processes:
                break
        else:
            pytest.fail(f"not told by {processes} processes:\n{told}")
    assert "most recent call first" in told, "no thread is told"
    assert 0 < waits.find("in RequestContext.__call__") < waits.find("in BodyLimitMiddleware.")
    assert "in RequestResponseCycle.receive" in waits
    assert server.get("/health").status_code == 200, "it serves on"


def _path_of(request: str, told: str) -> str | None:
    """The stack of a request's task, if the log is complete by now.

    Workers log at the same time, so their lines interleave. Only those of the worker with the
    request are used.
    """
    found = re.search(rf"WARNING (.*)task request {request}\n", told)
    if found is None:
        return None
    lines = re.findall(rf"WARNING {re.escape(found[1])}(.*\n)", told)
    after = lines[lines.index(f"task request {request}\n") + 1 :]
    path = list(itertools.takewhile(lambda line: line.startswith("    "), after))
    return "".join(path) if len(path) < len(after) else None

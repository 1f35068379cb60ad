"""``quire ray``: one model on the machines of a Ray cluster; here two nodes on one machine.

The traffic between them is tested without Ray in ``tests/server/test_nodes.py``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from loadtest.process import free_port
from tests.servers import ROOT, Server

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # for Ray's own warnings

_ENV = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "PYTHONPATH": str(ROOT)}
_START_S = 180.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster with two nodes."""
    from ray.cluster_utils import Cluster

    os.environ |= _ENV  # for the nodes, and all actors on them
    head = {"num_cpus": 1, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.add_node(num_cpus=1)
    yield made.address
    made.shutdown()


def quire_ray(address: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "server", "ray", "--ray-address", address, *flags]


@contextmanager
def served(address: str, folder: Path, port: int, *flags: str) -> Iterator[Server]:
    """A server on two machines."""
    here = ["--nnodes", "2", "--device", "cpu", "--num-threads", "1", "--port", str(port)]
    places = ["--num-gpu-blocks-override", "512", "--data-dir", str(folder / "data")]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            quire_ray(address, *here, *places, *flags),
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env={**os.environ, **_ENV},
        )
    server = Server(process, port, log)
    try:
        deadline = time.monotonic() + _START_S
        while not is_ready(server):
            assert process.poll() is None, server.tail()
            assert time.monotonic() < deadline, server.tail()
            time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait()
        server.close()


def is_ready(server: Server) -> bool:
    try:
        return server.get("/ready").status_code == 200
    except Exception:
        return False


def node_processes(port: int) -> list[psutil.Process]:
    """The ``quire serve`` process of each machine."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "serve" in line and str(port) in line and "--node-rank" in line:
            found.append(process)
    return found


def flag_of(process: psutil.Process, name: str) -> str:
    line = process.cmdline()
    return line[line.index(name) + 1]


def tokens_of_stream(server: Server, num_tokens: int, during: Callable[[], None]) -> int:
    """Stream a text and call ``during`` once it has begun; its number of tokens when it ended."""
    messages = [{"role": "user", "content": "Count from 1 to 50."}]
    body = {"model": "quire-demo", "messages": messages, "max_tokens": num_tokens}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    url, events = server.url + "/v1/chat/completions", []
    with server._client.stream("POST", url, json=body, timeout=_START_S) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                if len(events) == 3:
                    during()
    assert len(events) > 3, events
    return events[-1]["usage"]["completion_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_two_machines_answer_as_one_and_nothing_of_them_is_left(
    cluster: str, server: Server, cut: str, tmp_path: Path
) -> None:
    port = free_port()
    with served(cluster, tmp_path, port, cut, "2") as ours:
        assert (
            ours.chat(max_tokens=40).json()["choices"]
            == (server.chat(max_tokens=40).json()["choices"])
        )
        nodes = {flag_of(process, "--node-rank"): process for process in node_processes(port)}
        assert set(nodes) == {"0", "1"}
        secrets = {flag_of(p, "--node-secret-file") for p in nodes.values()}
        assert all(secret.startswith("/proc/") for secret in secrets), "on no disk"
        # Streams wait for a lost machine, and continue when it is back.
        assert tokens_of_stream(ours, 200, nodes["1"].kill) == 200
        ours.process.send_signal(signal.SIGTERM)
        assert ours.process.wait(60) == 0, ours.tail()
        assert not node_processes(port)
        assert not any(map(os.path.exists, secrets))
        told = Path(ours.log).read_text()
        assert "is started again" in told


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ((), "--nnodes"),
        (("--nnodes", "2", "--node-rank", "1"), "--node-rank"),
        (("--nnodes", "2", "--master-addr", "10.0.0.1"), "--master-addr"),
    ],
)
def test_what_ray_has_no_part_in_is_refused(flags: tuple[str, ...], reason: str) -> None:
    done = subprocess.run(
        quire_ray("127.0.0.1:1", *flags), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("quire ray: ")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_cluster_of_too_few_machines_is_told(cluster: str) -> None:
    code = (
        "import server.cli.ray_cluster as c, sys; c._PLACEMENT_S = 2.0; "
        "sys.exit(c.main(sys.argv[1:]))"
    )
    flags = ["--ray-address", cluster, "--nnodes", "3", "--tensor-parallel-size", "3"]
    done = subprocess.run(
        [sys.executable, "-c", code, *flags, "--device", "cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **_ENV},
    )
    assert done.returncode == 1, done.stderr
    assert "quire ray: 3 machines" in done.stderr
    assert "the cluster's 2 have" in done.stderr

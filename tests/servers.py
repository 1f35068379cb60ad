"""Real servers for tests: runs ``quire serve`` on a free port and talks to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.forked import ForkedProcess, fork_server

ROOT = Path(__file__).resolve().parent.parent
MODEL = "quire-demo"
START_LIMIT_S = 120.0  # generous: the machine may be busy
_ENV = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


class RawAnswer(NamedTuple):
    """An HTTP response as received from the socket."""

    status: int
    headers: dict[str, str]
    body: bytes
    rest: bytes = b""  # of the next response, if there is one

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


@dataclass
class Server:
    """A running server process."""

    process: subprocess.Popen[bytes] | ForkedProcess
    port: int
    log: Path
    key: str | None = None

    def __post_init__(self) -> None:
        self._client = httpx.Client(timeout=60)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self._client.get(self.url + path, headers=self.headers, **kwargs)

    def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None, **kwargs: Any
    ) -> httpx.Response:
        headers = {**self.headers, **(headers or {})}
        return self._client.post(self.url + path, json=body, headers=headers, **kwargs)

    def chat(self, text: str = "What is the capital of France?", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        body = {"model": MODEL, "messages": messages, "temperature": 0, **fields}
        return self.post("/v1/chat/completions", body)

    def complete(self, prompt: Any = "The capital of", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, **fields}
        return self.post("/v1/completions", body)

    def connect(self, timeout_s: float = 60.0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s)

    def raw(self, data: bytes, *, timeout_s: float = 60.0) -> RawAnswer:
        """Send bytes, and read until the server closes or the response is complete."""
        with self.connect(timeout_s) as sock:
            # It may be rejected before it is fully read; there is a response all the same.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(data)
            return read_answer(sock)

    def stream(self, path: str, body: dict[str, Any]) -> bytes:
        """The raw body of a streamed response."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        return answer.content

    def metrics(self) -> dict[str, float]:
        """Samples by name, summed over labels; labelled ones also as ``name{value}``."""
        totals: dict[str, float] = {}
        text = self.get("/metrics").text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removeprefix("quire:")
                if "le" in sample.labels:
                    continue
                totals[name] = totals.get(name, 0.0) + sample.value
                extra = [v for k, v in sample.labels.items() if k not in ("model_name", "engine")]
                if extra:
                    totals[f"{name}{{{','.join(extra)}}}"] = sample.value
        return totals

    def wait_for(self, condition: Any, what: str, limit_s: float = 30.0) -> dict[str, float]:
        """Poll the metrics until ``condition(metrics)``."""
        deadline = time.monotonic() + limit_s
        while True:
            metrics = self.metrics()
            if condition(metrics):
                return metrics
            if time.monotonic() > deadline:
                raise AssertionError(f"never saw {what}: {metrics}\n{self.tail()}")
            time.sleep(0.02)

    def wait_idle(self) -> dict[str, float]:
        """Wait until no sequence runs or waits and no block is held."""
        return self.wait_for(
            lambda m: (
                m["num_requests_running"] == m["num_requests_waiting"] == m["kv_blocks_held"] == 0
            ),
            "an idle engine",
        )

    def close(self) -> None:
        self._client.close()

    def processes(self, *modules: str) -> list[psutil.Process]:
        """Its processes that run ``modules``, in that order; those of each by their start."""
        parent = psutil.Process(self.process.pid)
        lines = {child: child.cmdline() for child in parent.children(recursive=True)}
        for child, line in lines.items():
            if line == parent.cmdline():
                lines[child] = ["engine.worker"]  # the only one that a server forks
        chosen = [[child for child in lines if module in lines[child]] for module in modules]
        return [child for each in chosen for child in sorted(each, key=psutil.Process.create_time)]

    def engines(self) -> list[psutil.Process]:
        """Its engine processes, by their start."""
        return self.processes("engine.worker")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def read_answer(sock: socket.socket, begun: bytes = b"") -> RawAnswer:
    """Read one response, up to its declared length, the last chunk, or the end.

    ``begun`` is the part of it that was already read with the previous response.
    """
    data = begun
    while b"\r\n\r\n" not in data:
        received = sock.recv(65536)
        if not received:
            raise ConnectionError(f"closed without an answer after {data!r}")
        data += received
    head, body = data.split(b"\r\n\r\n", 1)
    lines = head.decode("latin-1").split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
    length = int(headers["content-length"]) if "content-length" in headers else None
    while length is None or len(body) < length:
        if length is None and body.endswith(b"0\r\n\r\n"):
            break
        received = sock.recv(65536)
        if not received:
            break
        body += received
    end = len(body) if length is None else length
    return RawAnswer(int(lines[0].split()[1]), headers, body[:end], body[end:])


def http_post(
    path: str, body: bytes, *headers: str, content_type: str = "application/json"
) -> bytes:
    """A POST request as bytes."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: test",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


@contextmanager
def running_server(
    log: Path,
    *flags: str,
    key: str | None = None,
    wait: bool = True,
    environment: Mapping[str, str] | None = None,
    shell: str | None = None,
    is_forked: bool = True,
) -> Iterator[Server]:
    """Run a server on the demo model during the block; its log is shown on failure.

    Args:
        environment: further variables, which a server of its own interpreter has from its start.
        shell: a line of shell that starts the server, which is ``"$@"`` there, with ``exec``.
        is_forked: see ``tests/forked.py``. False for tests that tell its processes by their
            command lines.
    """
    arguments = ["serve", "--port", "0", "--num-threads", "1"]
    arguments += ["--num-gpu-blocks-override", "1024", *flags]
    if key is not None:
        arguments += ["--api-key", key]
    # Each test's server has its own data directory; --data-dir in the flags takes precedence.
    env = {**os.environ, **_ENV, "QUIRE_DATA_DIR": str(log.parent / "data")}
    env |= environment or {}
    process: subprocess.Popen[bytes] | ForkedProcess
    with log.open("wb") as output:
        if is_forked and environment is None and shell is None:
            process = fork_server(arguments, output.fileno(), ROOT, env)
        else:
            command = [] if shell is None else ["sh", "-c", shell, "sh"]
            command += [sys.executable, "-m", "server", *arguments]
            process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, env=env)
    server = Server(process, 0, log, key)
    try:
        server.port = _find_port(server)
        if wait:
            _await_ready(server)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        server.close()


def _find_port(server: Server) -> int:
    """The port that the process listens on, from the kernel's table of sockets."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and server.process.poll() is None:
        for port in _listening_ports(server.process.pid):
            return port
        time.sleep(0.02)
    raise AssertionError(f"the server did not start listening:\n{server.tail()}")


def _listening_ports(pid: int) -> Iterator[int]:
    try:
        links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        table = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return
    inodes = {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    for line in table:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            yield int(fields[1].rpartition(":")[2], 16)


def _await_ready(server: Server) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and server.process.poll() is None:
        if server.get("/ready").status_code == 200:
            return
        time.sleep(0.05)
    raise AssertionError(f"the server did not become ready:\n{server.tail()}")

"""Faults of the system under the server: few descriptors, a clock that is set, a full disk."""

from __future__ import annotations

import contextlib
import json
import mmap
import resource
import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path

import pytest

from server.http import descriptors
from tests.server.test_lifecycle import COMPLETIONS, LONG, dechunk
from tests.server.test_streams import events_of
from tests.servers import RawAnswer, Server, http_post, read_answer, running_server

# A clock of the system that runs ahead of the real one by the seconds that a shared file holds.
_SHIFTED_CLOCK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *shift;

__attribute__((constructor)) static void map(void) {
    int fd = open(getenv("TEST_CLOCK_SHIFT"), O_RDONLY);
    shift = mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
}
int clock_gettime(clockid_t id, struct timespec *now) {
    int status = syscall(SYS_clock_gettime, id, now);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) now->tv_sec += *shift;
    return status;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *seconds) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (seconds) *seconds = now.tv_sec;
    return now.tv_sec;
}
"""


def open_stream(server: Server, **fields: object) -> socket.socket:
    """A connection on which a long stream has begun."""
    sock = server.connect()
    sock.sendall(http_post(COMPLETIONS, json.dumps({**LONG, "stream": True, **fields}).encode()))
    server.wait_for(lambda m: m["num_requests_running"] == 1, "the stream")
    return sock


def probe(server: Server, path: str) -> RawAnswer:
    """The answer to a probe, which is tried again while the refused ones are being closed."""
    deadline = time.monotonic() + 10
    while True:
        with server.connect() as sock, contextlib.suppress(ConnectionError):
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: quire\r\n\r\n".encode())
            return read_answer(sock)
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_more_connections_than_descriptors(tmp_path: Path) -> None:
    """The last descriptors are the server's own: an engine that dies then is replaced."""
    shell = 'ulimit -n 64; exec "$@"'
    with running_server(tmp_path / "log", shell=shell) as server, contextlib.ExitStack() as held:
        stream = held.enter_context(open_stream(server))
        others = [held.enter_context(server.connect()) for _ in range(40)]
        # The first beyond the limit of 32 says nothing; it is refused in time all the same.
        others[33].sendall(http_post(COMPLETIONS, b"{}"))
        for refused in (others[33], others[31]):
            refusal = read_answer(refused)
            assert (refusal.status, refusal.error["code"]) == (503, "server_is_overloaded")
            assert refusal.headers["retry-after"] == "1"
        for refused in others[31:]:
            refused.close()
        # A probe is answered, so that a crowded server is not restarted as a dead one.
        for path in ("/health", "/metrics?all"):
            answer = probe(server, path)
            assert (answer.status, answer.headers["connection"]) == (200, "close")
        server.engines()[0].kill()
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += stream.recv(65536)
        assert b'"finish_reason":"length"' in data
        held.close()
        server.wait_for(lambda m: m["engine_restarts_total"] == 1, "the restart")
        assert server.chat(max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, 4096),
        (1024, resource.RLIM_INFINITY, 2**20),
        (2**21, 2**22, 2**21),
        (4096, 4096, 4096),
    ],
)
def test_the_limit_of_descriptors_is_raised(
    soft: int, hard: int, raised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda kind, new: limits.append(new))
    descriptors.raise_limit()
    assert limits[-1] == (raised, hard)
    assert descriptors.max_connections() == raised - 64


class ShiftedClock:
    """Shifts the wall-clock time of the processes that are started with ``environment``."""

    def __init__(self, directory: Path, compiler: str) -> None:
        library, file = directory / "clock.so", directory / "shift"
        file.write_bytes(struct.pack("q", 0))
        command = (compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library))
        subprocess.run(command, input=_SHIFTED_CLOCK.encode(), check=True)
        self.environment = {"LD_PRELOAD": str(library), "TEST_CLOCK_SHIFT": str(file)}
        with file.open("r+b") as opened:
            self._shared = mmap.mmap(opened.fileno(), 8)

    def set(self, hours: int) -> None:
        self._shared[:] = struct.pack("q", hours * 3600)


@pytest.fixture
def clock(tmp_path: Path) -> ShiftedClock:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    return ShiftedClock(tmp_path, compiler)


@pytest.mark.slow
def test_a_clock_that_is_set(tmp_path: Path, clock: ShiftedClock) -> None:
    """An hour forward or back while requests arrive, run and have a deadline: nothing notices."""
    half = http_post(COMPLETIONS, json.dumps({**LONG, "max_tokens": 2}).encode())
    with running_server(tmp_path / "log", environment=clock.environment) as server:
        assert abs(server.chat(max_tokens=1).json()["created"] - time.time()) < 600
        for hours in (1, -1):
            with open_stream(server, timeout=120) as stream, server.connect() as slow:
                slow.sendall(half[:40])
                clock.set(hours)
                created = server.chat(max_tokens=1).json()["created"]
                assert abs(created - time.time() - hours * 3600) < 600  # it was set, in fact
                slow.sendall(half[40:])
                assert read_answer(slow).status == 200
                events = events_of(dechunk(read_answer(stream).body))
                assert events[-1]["choices"][0]["finish_reason"] == "length"
        metrics = server.wait_idle()
        assert metrics.get("engine_restarts_total", 0) == 0
        durations = [value for name, value in metrics.items() if name.endswith("_seconds_sum")]
        assert len(durations) >= 4
        assert all(0 <= value < 1800 for value in durations)


@pytest.mark.slow
def test_logs_that_cannot_be_written(tmp_path: Path) -> None:
    """Everything that is logged goes to a full disk; requests are answered, errors included."""
    with running_server(tmp_path / "log", shell='exec "$@" 2>/dev/full') as server:
        assert server.chat(max_tokens=2).status_code == 200
        assert server.chat(temperature=9).status_code == 400
        server.engines()[0].kill()
        assert server.chat(max_tokens=2).status_code == 200
        assert server.stop() == 0

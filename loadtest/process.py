"""Starts a server for a measurement and stops it afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RunningServer:
    """A server's address, the root of its process tree, and its startup time."""

    url: str
    pid: int
    ready_s: float  # from start until ready

    def pause(self) -> None:
        """Stop the process group, so that a server that spins while idle slows no other down."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue after :meth:`pause`."""
        os.killpg(self.pid, signal.SIGCONT)


@contextlib.contextmanager
def running_server(
    arguments: Sequence[str],
    *,
    command: Sequence[str] = (),
    ready_s: float = 300.0,
    api_key: str | None = None,
) -> Iterator[RunningServer]:
    """Run Quire's server, ready, on a free port of this machine.

    Args:
        arguments: put after ``serve``, such as the model; the port is added.
        command: the command that runs Quire; this interpreter's if empty.
        ready_s, api_key: as in :func:`running_command`, whose errors are raised too.
    """
    start = [*(command or (sys.executable, "-m", "server")), "serve", *arguments]
    with running_command(start, ready_path="/ready", ready_s=ready_s, api_key=api_key) as server:
        yield server


@contextlib.contextmanager
def running_command(
    command: Sequence[str],
    *,
    ready_path: str,
    ready_s: float = 300.0,
    api_key: str | None = None,
) -> Iterator[RunningServer]:
    """Run any server that takes ``--port``, ready, on a free port of this machine.

    Args:
        command: the command that starts it; the port is added.
        ready_path: the path that answers 200 once the server is ready.
        ready_s: the time limit for that, in seconds.
        api_key: the key to send with the readiness probe.

    Raises:
        RuntimeError: it exited, or was not ready in time; the message holds the end of its output.
        OSError: the command cannot be run.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # A terminated measurement must not leave its server running.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryFile() as log:
        begun_s = time.monotonic()
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=log, stderr=log, start_new_session=True
        )
        try:
            try:
                headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
                probe = urllib.request.Request(f"{url}{ready_path}", headers=headers)
                _wait_until_ready(process, probe, begun_s + ready_s)
            except RuntimeError as error:
                log.seek(0)
                output = log.read()[-4000:].decode("utf-8", "replace")
                raise RuntimeError(f"{error}\n{output}") from None
            yield RunningServer(url, process.pid, time.monotonic() - begun_s)
        finally:
            _stop(process)
            signal.signal(signal.SIGTERM, previous)


def free_port() -> int:
    """A port that is free at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _wait_until_ready(
    process: subprocess.Popen[bytes], probe: urllib.request.Request, deadline_s: float
) -> None:
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(probe, timeout=5):
                return
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass  # not listening yet
        time.sleep(0.05)
    raise RuntimeError("the server was not ready in time")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to stop, then kill its whole process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)  # a paused process does not handle signals
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

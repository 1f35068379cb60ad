"""A server started for a measurement, and ended after it."""

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
    """Its address, the process at the head of its tree, and how long it took to be ready."""

    url: str
    pid: int
    ready_s: float  # from its start until it told that it was ready

    def pause(self) -> None:
        """Stop the whole group: a server that spins while idle must not slow another one down."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run again."""
        os.killpg(self.pid, signal.SIGCONT)


@contextlib.contextmanager
def running_server(
    arguments: Sequence[str],
    *,
    command: Sequence[str] = (),
    ready_s: float = 300.0,
    api_key: str | None = None,
) -> Iterator[RunningServer]:
    """Quire's server, ready, on a free port of this machine.

    Args:
        arguments: put after ``serve``, such as the model; the port is added.
        command: what runs Quire's command line; this interpreter's where empty.
        ready_s: as of :func:`running_command`, whose errors are raised too.
        api_key: as there.
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
    """Any server that takes ``--port``, ready, on a free port of this machine.

    Args:
        command: starts it; the port is added.
        ready_path: answers 200 once it can serve.
        ready_s: seconds it is given until then.
        api_key: what it wants to be asked with.

    Raises:
        RuntimeError: it ended, or was not ready in time; holds the end of its output.
        OSError: the command cannot be run.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # A measurement that is told to end must not leave its server running.
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
            _end(process)
            signal.signal(signal.SIGTERM, previous)


def free_port() -> int:
    """A port that was free a moment ago."""
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


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to stop; then end the whole group that it leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)  # one that is paused hears nothing
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

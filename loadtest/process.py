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
    """Its address, and the process at the head of its tree."""

    url: str
    pid: int


@contextlib.contextmanager
def running_server(
    arguments: Sequence[str], *, command: Sequence[str] = (), ready_s: float = 300.0
) -> Iterator[RunningServer]:
    """A server that is ready, on a free port of this machine.

    Args:
        arguments: put after ``serve``, such as the model; the port is added.
        command: what runs Quire's command line; this interpreter's where empty.
        ready_s: seconds it is given until ``/ready`` (or ``/health``) answers 200.

    Raises:
        RuntimeError: it ended, or was not ready in time; holds the end of its output.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # A measurement that is told to end must not leave its server running.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    start = [*(command or (sys.executable, "-m", "server")), "serve", *arguments]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*start, "--port", str(port)], stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait_until_ready(process, url, time.monotonic() + ready_s)
            yield RunningServer(url, process.pid)
        except RuntimeError as error:
            log.seek(0)
            output = log.read()[-4000:].decode("utf-8", "replace")
            raise RuntimeError(f"{error}\n{output}") from None
        finally:
            _end(process)
            signal.signal(signal.SIGTERM, previous)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, deadline_s: float) -> None:
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass  # not listening yet
        time.sleep(0.05)
    raise RuntimeError("the server was not ready in time")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to stop; then end the whole group that it leads."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

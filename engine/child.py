"""A Python child process connected by a socket pair."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Idle threads of the tensor library spin, by default for milliseconds, on cores that others could
# use. Some tens of microseconds are enough to bridge the gap between two operations.
_OPENMP_ENV = {"GOMP_SPINCOUNT": "1000"}


class Child:
    """A running ``python -m MODULE FD ...``, where ``FD`` is its end of the socket pair.

    End-of-file on ``socket`` means that the child has exited. The child in turn is expected to exit
    when it reads end-of-file. It is passed ``--die-with-parent`` if the kernel can ensure that too.

    Args:
        module: the module to run.
        arguments: command-line arguments after ``FD``.
        pass_fds: further descriptors to inherit, under the same numbers.
    """

    def __init__(self, module: str, *arguments: str, pass_fds: Sequence[int] = ()) -> None:
        self.socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", module, str(theirs.fileno()), *arguments]
        # The kernel kills such a child when the *thread* that started it ends.
        if threading.current_thread() is threading.main_thread():
            command.append("--die-with-parent")
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with theirs:
            self.process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), *pass_fds),
                stdin=subprocess.DEVNULL,
                env={**_OPENMP_ENV, **os.environ, "PYTHONPATH": path},
                process_group=0,  # only its parent handles Ctrl-C at the terminal
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def kill(self) -> None:
        """Kill it at once. Idempotent."""
        self.socket.close()
        self.process.kill()
        self.process.wait()

    def end(self, grace_s: float) -> int:
        """Wait for it to exit, by force if it takes too long; returns the exit code."""
        for force in (self.process.terminate, self.process.kill):
            try:
                return self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                force()
        return self.process.wait()


def describe_exit(code: int) -> str:
    """How a child ended, in words; ``code`` is its exit code, or minus the signal's number."""
    if code >= 0:
        return f"exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    # The kernel's out-of-memory killer leaves no other trace in the process.
    return f"{name} (is there enough memory?)" if name == "SIGKILL" else name


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends (Linux only).

    A safeguard beside end-of-file, in case a call holds the GIL for long. Parents request it only
    if the thread that starts the child is their main thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

"""A Python process of our own, at the other end of a socket pair."""

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
# Threads of the tensor library that have nothing to do look for work, by default for milliseconds,
# on cores that others could use: some tens of microseconds bridge what lies between two operations.
_PATIENCE = {"GOMP_SPINCOUNT": "1000"}


class Child:
    """A running ``python -m MODULE FD ...``, where ``FD`` is its end of the socket pair.

    End-of-file on ``socket`` means that it has ended. In its turn it is expected to end when it
    reads end-of-file, and is given ``--die-with-parent`` where the kernel can see to that too.

    Args:
        module: what to run.
        arguments: put after ``FD``.
        pass_fds: further descriptors that it inherits, under the same numbers.
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
                env={**_PATIENCE, **os.environ, "PYTHONPATH": path},
                process_group=0,  # a Ctrl-C at the terminal is its parent's alone
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def kill(self) -> None:
        """End it at once, whatever it does. Idempotent."""
        self.socket.close()
        self.process.kill()
        self.process.wait()

    def end(self, grace_s: float) -> int:
        """Wait for its end, and force it when it takes too long; returns the exit code."""
        for force in (self.process.terminate, self.process.kill):
            try:
                return self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                force()
        return self.process.wait()


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux only).

    Belt and braces beside end-of-file, for the case that a call holds the interpreter's lock for
    long. Only asked for by a parent whose starting thread is its main one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

"""A machine of a Ray cluster that has a part of one model: what ``quire ray`` runs on each."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


class RayNode:
    """An actor that starts ``quire serve`` on its machine and sees to it; it has one at a time.

    No method waits for long: Ray runs them one after the other, in one thread, with whose end the
    server ends as well.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._secret: int | None = None  # a file in memory, gone with this process

    def address(self) -> str:
        """This machine's address, as Ray's other machines reach it."""
        import ray

        return ray.util.get_node_ip_address()

    def start(self, flags: Sequence[str], secret: str) -> None:
        """Start ``quire serve`` with ``flags`` and a secret that all machines have."""
        if self._secret is None:
            self._secret = os.memfd_create("quire-node-secret")
            os.write(self._secret, secret.encode())
        # To be opened by processes of this user alone.
        place = f"/proc/{os.getpid()}/fd/{self._secret}"
        command = [sys.executable, "-m", "server", "serve", *flags, "--node-secret-file", place]
        self._process = subprocess.Popen(command, preexec_fn=_end_with_parent)

    def poll(self) -> int | None:
        """The exit status of what was started, once it has ended."""
        return None if self._process is None else self._process.poll()

    def terminate(self) -> None:
        """Ask it to finish what it serves and end."""
        if self._process is not None:
            self._process.terminate()

    def stop(self, grace_s: float) -> None:
        """End it, and leave nothing behind."""
        self.terminate()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
            self._process.kill()


def _end_with_parent() -> None:
    """In the child: SIGTERM when the actor's process is gone, however it went."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

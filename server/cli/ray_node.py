"""The actor that ``quire ray`` runs on each machine of a Ray cluster."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


class RayNode:
    """An actor that starts ``quire serve`` on its machine and supervises it, one at a time.

    No method blocks for long: Ray runs them one after the other in a single thread, and the server
    exits with that thread.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._secret: int | None = None  # an in-memory file that vanishes with this process

    def address(self) -> str:
        """This machine's address, as seen from Ray's other machines."""
        import ray

        return ray.util.get_node_ip_address()

    def start(self, flags: Sequence[str], secret: str) -> None:
        """Start ``quire serve`` with ``flags`` and a secret that all machines share."""
        if self._secret is None:
            self._secret = os.memfd_create("quire-node-secret")
            os.write(self._secret, secret.encode())
        # Only processes of this user can open it.
        place = f"/proc/{os.getpid()}/fd/{self._secret}"
        command = [sys.executable, "-m", "server", "serve", *flags, "--node-secret-file", place]
        self._process = subprocess.Popen(command, preexec_fn=_terminate_with_parent)

    def poll(self) -> int | None:
        """The exit status of the server once it has exited."""
        return None if self._process is None else self._process.poll()

    def terminate(self) -> None:
        """Ask the server to finish its requests and exit."""
        if self._process is not None:
            self._process.terminate()

    def stop(self, grace_s: float) -> None:
        """Stop the server, by force after ``grace_s`` seconds."""
        self.terminate()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
            self._process.kill()


def _terminate_with_parent() -> None:
    """In the child: request SIGTERM when the actor's process ends, for whatever reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

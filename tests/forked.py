"""Servers forked from a process that has imported all they need, for tests of other things.

``python -m server serve`` takes about four CPU seconds to import torch and the rest, nine tenths of
what the embedded model takes to be ready. A forked server saves them. It runs the same code in
processes of its own, with its own files, sockets, signals and exit status; only their command lines
are those of the process they were forked from.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, reduction
from pathlib import Path
from typing import Any
from unittest import mock

_IMPORTED = (
    "tests.forked",
    "engine.worker",
    "engine.runner.model_runner",
    "server.cli.serve",
    "server.app",
)
_ENVIRONMENT = dict(os.environ)  # before a test changes it: some modules read theirs once

_from_imports = multiprocessing.get_context("forkserver")
_from_this = multiprocessing.get_context("fork")


class ForkedProcess:
    """A forked process, with the methods of ``subprocess.Popen`` that its users call."""

    def __init__(self, process: Any) -> None:
        self._process = process
        process.start()
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Output:
    """An open file that the forked process writes its output to."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self._descriptor),)


def _received(duplicate: Any) -> int:
    return duplicate.detach()


def fork_server(
    arguments: Sequence[str], output: int, directory: Path, environment: Mapping[str, str]
) -> ForkedProcess:
    """Run ``quire`` with ``arguments`` in ``directory``, its output to a file descriptor."""
    with mock.patch.dict(os.environ, _ENVIRONMENT | {"OMP_NUM_THREADS": "1"}, clear=True):
        _from_imports.set_forkserver_preload(list(_IMPORTED))
        forkserver.ensure_running()
    place = (_Output(output), str(directory), dict(environment))
    return ForkedProcess(_from_imports.Process(target=_serve, args=(list(arguments), *place)))


def _serve(arguments: list[str], output: int, directory: str, environment: dict[str, str]) -> None:
    from engine import child
    from server import cli

    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.chdir(directory)
    _set_environment(environment)
    child.subprocess = _EngineStarts
    sys.exit(cli.main(arguments))


class _EngineStarts:
    """In place of ``subprocess`` in ``engine.child``: the server's first step forks its engine.

    Later ones have threads, which a fork would lose, and start theirs as ever.
    """

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    @staticmethod
    def Popen(command: list[str], **options: Any) -> ForkedProcess | subprocess.Popen[bytes]:  # noqa: N802
        if "--ahead" not in command:
            return subprocess.Popen(command, **options)
        (descriptor,) = options["pass_fds"]
        arguments = (command[3:], descriptor, options["env"])
        return ForkedProcess(_from_this.Process(target=_run_engine, args=arguments))


def _run_engine(arguments: list[str], descriptor: int, environment: dict[str, str]) -> None:
    from engine import worker

    os.setpgid(0, 0)
    # Above all the server's end of the connection, which would never seem closed.
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
    _set_environment(environment)
    sys.exit(worker.main(arguments))


def _set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)

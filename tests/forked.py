"""Servers and engines forked from a process that has imported all they need.

``python -m server serve`` takes about four CPU seconds to import torch and the rest, nine tenths of
what the embedded model takes to be ready. A forked server saves them. It runs the same code in
processes of its own, with its own files, sockets, signals and exit status; only their command lines
are those of the process they were forked from. So does the engine of a test that needs no server.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
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


class _Inherited:
    """A file descriptor that a forked process inherits, perhaps under another number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _detach, (reduction.DupFd(self._number),)


def _detach(duplicate: Any) -> int:
    return duplicate.detach()


def prepare() -> None:
    """Start the process that others are forked from. Idempotent."""
    with mock.patch.dict(os.environ, _ENVIRONMENT | {"OMP_NUM_THREADS": "1"}, clear=True):
        _from_imports.set_forkserver_preload(list(_IMPORTED))
        forkserver.ensure_running()


def fork_server(
    arguments: Sequence[str], output: int, directory: Path, environment: Mapping[str, str]
) -> ForkedProcess:
    """Run ``quire`` with ``arguments`` in ``directory``, its output to a file descriptor."""
    place = (_Inherited(output), str(directory), dict(environment))
    return _fork_from_imports(_serve, list(arguments), *place)


class EngineStarts:
    """In place of ``subprocess`` in ``engine.child``: engines are forked, and nothing else."""

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    @staticmethod
    def Popen(command: list[str], **options: Any) -> ForkedProcess | subprocess.Popen[bytes]:  # noqa: N802
        if command[2] != "engine.worker":
            return subprocess.Popen(command, **options)
        (descriptor,) = options["pass_fds"]
        files = map(_Inherited, (descriptor, 1, 2))
        return _fork_from_imports(_run_engine, command[4:], options["env"], *files, is_daemon=True)


class _FirstEngineStarts(EngineStarts):
    """In place of it in a forked server: its first step forks its engine, from itself.

    Later ones have threads, which a fork would lose, and start theirs as ever.
    """

    @staticmethod
    def Popen(command: list[str], **options: Any) -> ForkedProcess | subprocess.Popen[bytes]:  # noqa: N802
        if "--ahead" not in command:
            return subprocess.Popen(command, **options)
        (descriptor,) = options["pass_fds"]
        arguments = (command[4:], options["env"], descriptor)
        return ForkedProcess(_from_this.Process(target=_run_engine, args=arguments))


def _fork_from_imports(
    target: Callable[..., None], *arguments: Any, is_daemon: bool = False
) -> ForkedProcess:
    prepare()
    process = _from_imports.Process(target=target, args=arguments, daemon=is_daemon)
    return ForkedProcess(process)


def _serve(arguments: list[str], output: int, directory: str, environment: dict[str, str]) -> None:
    from engine import child
    from server import cli

    _take_over(environment, output, output)
    os.chdir(directory)
    child.subprocess = _FirstEngineStarts
    sys.exit(cli.main(arguments))


def _run_engine(
    flags: list[str], environment: dict[str, str], connection: int, output: int = 1, errors: int = 2
) -> None:
    from engine import worker

    os.setpgid(0, 0)
    _take_over(environment, output, errors)
    # Above all its server's end of the connection, which would never seem closed.
    os.closerange(3, connection)
    os.closerange(connection + 1, os.sysconf("SC_OPEN_MAX"))
    sys.exit(worker.main([str(connection), *flags]))


def _take_over(environment: Mapping[str, str], output: int, errors: int) -> None:
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.environ.clear()
    os.environ.update(environment)

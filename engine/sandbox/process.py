"""A killable process that answers frames: the parent's side."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

_WORKER = Path(__file__).with_name("worker.py")
_START_LIMIT_S = 60.0  # for an interpreter to start on a busy machine
# Wall-clock limit of an answer as a multiple of its CPU time, since a child may get no core.
_WALL_CLOCK_FACTOR = 10.0
_EXIT_TIMEOUT_S = 1.0  # from closing the child's pipes to its exit
_MAX_REPLY_BYTES = 64 * 2**20
_MEMORY_BYTES = 256 * 2**20


class SandboxedProcess:
    """One child process, started when needed and replaced when killed.

    Calls from several threads are serialised. Only two pipes are shared with the child.

    Args:
        handler: the file that defines the child's work.
        modules: modules that it needs besides the standard library.
        first: the frame that initialises it.
        limit_s: CPU time that an answer may take, in seconds.
        memory_bytes: that it may use beyond what it uses when it is ready.
    """

    def __init__(
        self,
        handler: Path,
        modules: Sequence[str],
        first: dict[str, Any],
        *,
        limit_s: float,
        memory_bytes: int = _MEMORY_BYTES,
    ) -> None:
        self._handler = handler
        self._modules = modules
        self._first = first
        self._limit_s = limit_s
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def start(self) -> None:
        """Start the child now instead of with the first call; does not wait for it."""
        with self._lock:
            self._ensure_child()

    def close(self) -> None:
        """End the child. A later call starts a new one."""
        with self._lock:
            self._end_child()

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the handler's answer.

        Raises:
            TimeoutError: the child was killed because it took too long.
            OSError: the child has exited, or did not start.
            UnicodeEncodeError: ``request`` contains a lone surrogate.
        """
        data = _frame(request)
        with self._lock:
            child = self._ensure_child()
            try:
                if not self._ready:
                    _exchange(child, b"", _START_LIMIT_S)
                    self._ready = True
                reply = _exchange(child, data, self._limit_s * _WALL_CLOCK_FACTOR)
            except BrokenPipeError:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_EXIT_TIMEOUT_S)
                self._end_child()
                if child.returncode == -signal.SIGPROF:
                    raise TimeoutError from None
                raise
            except BaseException:
                self._end_child()  # the stream may be in the middle of a frame, and so is unusable
                raise
            if reply.get("last"):
                self._end_child()
        return reply

    def _ensure_child(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end_child()
        child = _spawn(self._handler, self._modules)
        self._child = child
        self._finalizer = weakref.finalize(self, _end, child)
        # This usually fits into the pipe's buffer; otherwise it waits for the child to read it.
        limits = {"limit_s": self._limit_s, "memory_bytes": self._memory_bytes}
        first = {**self._first, **limits}
        try:
            _send(child, _frame(first), time.monotonic() + _START_LIMIT_S)
        except OSError:
            self._end_child()
            raise
        return child

    def _end_child(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._child = self._finalizer = None
        self._ready = False


def _spawn(handler: Path, modules: Sequence[str]) -> subprocess.Popen[bytes]:
    """A confined interpreter: no site-packages, no environment, no inherited files."""
    specs = [importlib.util.find_spec(name) for name in modules]
    origins = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    module_dirs = sorted({str(Path(origin).parent.parent) for origin in origins})
    interpreter = [sys.executable, "-I", "-S", "-X", "utf8"]
    child = subprocess.Popen(
        [*interpreter, str(_WORKER), str(handler), *module_dirs],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in ("TZ",) if name in os.environ},
        cwd="/",
        start_new_session=True,  # the terminal's interrupts are not for it
        bufsize=0,
    )
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
    return child


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def _frame(value: dict[str, Any]) -> bytes:
    data = msgspec.json.encode(value)
    return struct.pack(">I", len(data)) + data


def _exchange(child: subprocess.Popen[bytes], request: bytes, limit_s: float) -> dict[str, Any]:
    """Send a frame and read one back. Raises TimeoutError, or another OSError at end-of-file."""
    deadline_s = time.monotonic() + limit_s
    _send(child, request, deadline_s)
    (size,) = struct.unpack(">I", _receive(child, 4, deadline_s))
    if size > _MAX_REPLY_BYTES:
        raise OSError("the reply is too large")
    return msgspec.json.decode(_receive(child, size, deadline_s), type=dict)


def _send(child: subprocess.Popen[bytes], data: bytes, deadline_s: float) -> None:
    assert child.stdin is not None
    fd = child.stdin.fileno()
    left = memoryview(data)
    while left:
        _wait(fd, select.POLLOUT, deadline_s)
        left = left[os.write(fd, left) :]


def _receive(child: subprocess.Popen[bytes], size: int, deadline_s: float) -> bytes:
    assert child.stdout is not None
    fd = child.stdout.fileno()
    chunks: list[bytes] = []
    while size:
        _wait(fd, select.POLLIN, deadline_s)
        chunk = os.read(fd, min(size, 2**20))
        if not chunk:
            raise BrokenPipeError("the process has ended")
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _wait(fd: int, event: int, deadline_s: float) -> None:
    """Wait until ``fd`` is ready (by poll, since descriptors may exceed select's range)."""
    poller = select.poll()
    poller.register(fd, event)
    left_s = deadline_s - time.monotonic()
    if left_s <= 0 or not poller.poll(left_s * 1000):
        raise TimeoutError

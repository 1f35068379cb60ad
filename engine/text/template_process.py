"""The killable process that renders chat templates, as its parent sees it."""

from __future__ import annotations

import importlib.util
import os
import select
import struct
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import TemplateError

_WORKER = Path(__file__).with_name("template_worker.py")
_START_LIMIT_S = 60.0  # a started interpreter, on a machine that has much else to do
_MAX_REPLY_BYTES = 64 * 2**20


class RenderProcess:
    """Renders templates in one child process, started when needed and replaced when killed.

    Calls from several threads take turns. Nothing is shared with the child but two pipes.
    """

    def __init__(self, templates: dict[str, str], *, limit_s: float) -> None:
        """Render ``templates`` (sources by name), each call within ``limit_s`` seconds."""
        self._templates = templates
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def start(self) -> None:
        """Start the child now rather than with the first call; does not wait for it."""
        with self._lock:
            self._ensure_child()

    def close(self) -> None:
        """End the child. A later call starts another one."""
        with self._lock:
            self._end_child()

    def render(self, name: str, context: dict[str, Any]) -> str:
        """The text that template ``name`` makes of ``context``.

        Raises:
            TemplateError: it refused, failed, or was killed for its use of time or memory.
            UnicodeEncodeError: ``context`` holds a lone surrogate.
        """
        request = _frame({"template": name, "context": context})
        with self._lock:
            child = self._ensure_child()
            try:
                if not self._ready:
                    _exchange(child, b"", _START_LIMIT_S)
                    self._ready = True
                reply = _exchange(child, request, self._limit_s)
            except TimeoutError:
                self._end_child()
                limit = f"{self._limit_s:g} s"
                raise TemplateError(f"the chat template did not finish within {limit}") from None
            except BaseException as error:
                self._end_child()  # in the middle of a frame: of no further use
                if isinstance(error, OSError):
                    raise TemplateError("the chat template's process ended") from None
                raise
            if reply.get("last"):
                self._end_child()
        if "text" not in reply:
            raise TemplateError(reply["error"])
        return reply["text"]

    def _ensure_child(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end_child()
        child = _spawn()
        self._child = child
        self._finalizer = weakref.finalize(self, _end, child)
        # Fits the pipe's buffer in all but odd cases, where it waits for the child to read it.
        first = {"templates": self._templates, "limit_s": self._limit_s + 1.0}
        try:
            _send(child, _frame(first), time.monotonic() + _START_LIMIT_S)
        except OSError as error:
            self._end_child()
            raise TemplateError("the chat template's process did not start") from error
        return child

    def _end_child(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._child = self._finalizer = None
        self._ready = False


def _spawn() -> subprocess.Popen[bytes]:
    """A confined interpreter with jinja2: no site-packages, no environment, no inherited files."""
    specs = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    origins = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    module_dirs = sorted({str(Path(origin).parent.parent) for origin in origins})
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-X", "utf8", str(_WORKER), *module_dirs],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in ("TZ",) if name in os.environ},
        cwd="/",
        start_new_session=True,  # an interrupt at the terminal is not for it
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
    """Send a frame and read one back. Raises TimeoutError, or another OSError when it has ended."""
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
    """Wait until ``fd`` is ready (poll: a server has file descriptors beyond select's reach)."""
    poller = select.poll()
    poller.register(fd, event)
    left_s = deadline_s - time.monotonic()
    if left_s <= 0 or not poller.poll(left_s * 1000):
        raise TimeoutError

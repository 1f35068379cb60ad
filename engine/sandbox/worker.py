"""The confined process itself: standard library only, run as a script.

It inherits no files or environment, cannot open files once it is ready, and has limits on its
address space and CPU time; exceeding the latter kills it. The parent additionally limits the
wall-clock time. The work is defined by a handler (see the package).

    python worker.py HANDLER MODULE_DIR...

Frames in both directions are 4 bytes of length, big-endian, then UTF-8 JSON. The first frame is
``{"limit_s": s, "memory_bytes": n, ...}``, with further keys for the handler, and is answered by
``{"ready": true}``.
The handler answers each further frame, with ``"last": true`` if the process exits afterwards.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import signal
import struct
import sys
from types import ModuleType
from typing import Any, BinaryIO


def main(handler_file: str, module_dirs: list[str]) -> None:
    """Answer frames from standard input until end-of-file."""
    sys.path.extend(module_dirs)  # the interpreter starts without site-packages, which is faster
    reader, writer = sys.stdin.buffer, sys.stdout.buffer
    first = _read(reader)
    if first is None:
        return
    handler = _load(handler_file)
    answer = handler.prepare(first)
    _apply_limits(first["memory_bytes"])
    _write(writer, {"ready": True})
    while (request := _read(reader)) is not None:
        signal.setitimer(signal.ITIMER_PROF, first["limit_s"])
        try:
            reply = answer(request)
        except MemoryError:
            # How much memory is left is unknown.
            _write(writer, {**handler.exhausted(), "last": True})
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(writer, reply)


def _load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("handler", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _apply_limits(memory_bytes: int) -> None:
    """Limit this process to the resources that its work needs.

    ``memory_bytes`` is beyond what it uses now.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[0])
        _limit(resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes)
    except (OSError, ValueError):
        pass  # not Linux: the timer remains
    _limit(resource.RLIMIT_NOFILE, 3)  # standard input, output and error: no file can be opened
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)


def _limit(kind: int, value: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (value, value))


def _read(reader: BinaryIO) -> dict[str, Any] | None:
    header = reader.read(4)
    if len(header) < 4:
        return None
    return json.loads(reader.read(struct.unpack(">I", header)[0]))


def _write(writer: BinaryIO, value: dict[str, Any]) -> None:
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    writer.write(struct.pack(">I", len(data)) + data)
    writer.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

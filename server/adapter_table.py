"""The table of served adapters, shared by all API workers.

The table is a JSON file that is replaced as a whole, next to a counter that all workers map into
memory. A worker compares the counter on every lookup and rereads the file if the counter has moved.
The counter moves before a change is answered, so no worker can serve a later request from an older
table. Nobody has to be notified, so a worker that hangs, dies or has just started is not a special
case.

The counter is read without a lock. It is one aligned word. On processors that reorder stores, the
sockets provide the ordering: the response to a change is sent after the counter is stored, and a
request that follows from it is received before the counter is loaded.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import msgspec

from engine.types import Adapter

_COUNTER = struct.Struct("<Q")


class ServedAdapter(msgspec.Struct, frozen=True):
    """An adapter and its name."""

    adapter: Adapter
    created: int  # Unix time at which it was loaded


class _Content(msgspec.Struct, frozen=True):
    version: int  # of the counter; 0: nothing has been written yet
    served: dict[str, ServedAdapter]


class AdapterTable:
    """Adapters by name. Every read sees all changes that were answered before it.

    Args:
        path: the file that the workers share; None if this is the only process.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._content = _Content(0, {})
        self._file = None if path is None else _SharedFile(path)

    @property
    def served(self) -> Mapping[str, ServedAdapter]:
        """The adapters served now, by name. Read-only."""
        if self._file is not None and self._content.version < self._file.version:
            self._content = self._file.read()
        return self._content.served

    def put(self, served: Mapping[str, ServedAdapter], *, initial: bool = False) -> None:
        """Serve these adapters, replacing any of the same name.

        Args:
            served: by name.
            initial: the initial set of a server; ignored if the table was ever written.
        """
        with self._change() as table:
            if not initial or self._content.version == 0:
                table.update(served)

    def remove(self, name: str) -> None:
        """Stop serving a name. Raises KeyError if it is not served."""
        with self._change() as table:
            del table[name]

    @contextmanager
    def _change(self) -> Iterator[dict[str, ServedAdapter]]:
        """Yield a copy of the newest table, and store it if the block exits normally."""
        with nullcontext() if self._file is None else self._file.lock():
            if self._file is not None:
                self._content = self._file.read()
            table = dict(self._content.served)
            yield table
            content = _Content(self._content.version + 1, table)
            if self._file is not None:
                self._file.write(content)
            self._content = content


class _SharedFile:
    """The file and its counter.

    If a worker is killed between writing the two, it has answered no request, and the next holder
    of the lock moves the counter for it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._lock_fd = os.open(path.with_suffix(".version"), flags, 0o600)
        os.ftruncate(self._lock_fd, _COUNTER.size)
        self._counter = mmap.mmap(self._lock_fd, _COUNTER.size)

    @property
    def version(self) -> int:
        """The newest table's version, without reading the table."""
        return _COUNTER.unpack_from(self._counter)[0]

    def read(self) -> _Content:
        """The newest table."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Content)
        except FileNotFoundError:
            return _Content(0, {})

    def write(self, content: _Content) -> None:
        """Replace the table. The lock must be held."""
        # Write the file before the counter: a reader that sees the counter move must find the new
        # table.
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(content))
        fresh.replace(self._path)
        self._set_version(content.version)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude other writers for the duration of the block, which must not await."""
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        try:
            self._set_version(self.read().version)
            yield
        finally:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def _set_version(self, version: int) -> None:
        _COUNTER.pack_into(self._counter, 0, version)

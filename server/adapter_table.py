"""Which adapters are served, the same for all API workers.

The table is a JSON file that is replaced as a whole, beside a counter that all workers map: whoever
looks an adapter up compares the counter, and reads the file again where it has moved. The counter
moves before a change is answered, so no worker can answer a later request by an older table; and
there is nobody to be told, so a worker that hangs, dies or has only just begun is no special case.

The counter is read without a lock. It is one aligned word, and what orders it, on processors that
reorder stores as well, are the sockets: a change's answer is sent after the counter was stored, and
a request that follows from it is received before the counter is loaded.
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


class Served(msgspec.Struct, frozen=True):
    """An adapter under its name."""

    adapter: Adapter
    created: int  # Unix time at which it was loaded


class _Content(msgspec.Struct, frozen=True):
    version: int  # of the counter; 0: nobody has written yet
    served: dict[str, Served]


class AdapterTable:
    """Adapters by name. Every look sees all changes that were answered before it.

    Args:
        path: of the file that the workers share; None where there is only this process.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._content = _Content(0, {})
        self._file = None if path is None else _SharedFile(path)

    @property
    def served(self) -> Mapping[str, Served]:
        """What is served now; not to be changed."""
        if self._file is not None and self._content.version < self._file.version:
            self._content = self._file.read()
        return self._content.served

    def put(self, served: Mapping[str, Served], *, first: bool = False) -> None:
        """Serve these under their names, in place of those that are served so.

        Args:
            served: by name.
            first: what a server begins with, to be passed over once anything was ever changed.
        """
        with self._change() as table:
            if not first or self._content.version == 0:
                table.update(served)

    def remove(self, name: str) -> None:
        """Serve a name no longer. Raises KeyError where it is not served."""
        with self._change() as table:
            del table[name]

    @contextmanager
    def _change(self) -> Iterator[dict[str, Served]]:
        """A copy of the newest table, which it replaces where the block ends well."""
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
    """The file and its counter. A worker that is killed between the two has answered nobody, and
    whoever locks next moves the counter for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._locked = os.open(path.with_suffix(".version"), flags, 0o600)
        os.ftruncate(self._locked, _COUNTER.size)
        self._counter = mmap.mmap(self._locked, _COUNTER.size)

    @property
    def version(self) -> int:
        """Of the newest table, without reading it."""
        return _COUNTER.unpack_from(self._counter)[0]

    def read(self) -> _Content:
        """The newest table."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Content)
        except FileNotFoundError:
            return _Content(0, {})

    def write(self, content: _Content) -> None:
        """Replace the table, under the lock."""
        # The file before the counter: who sees the counter move finds what it counts.
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(content))
        fresh.replace(self._path)
        self._count(content.version)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other writers out while the block runs: it must not wait."""
        fcntl.flock(self._locked, fcntl.LOCK_EX)
        try:
            self._count(self.read().version)
            yield
        finally:
            fcntl.flock(self._locked, fcntl.LOCK_UN)

    def _count(self, version: int) -> None:
        _COUNTER.pack_into(self._counter, 0, version)

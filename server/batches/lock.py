"""Who takes care of a batch: the process that holds the lock on its file.

The kernel gives a dead process's locks back at once, so there are no leases to wait for and no
clocks to compare. On a network file system that has no ``flock``, run one server a data directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class BatchLock:
    """Held from ``take`` to ``release``."""

    def __init__(self, path: Path, number: int | None) -> None:
        self._path = path
        self._number = number

    @classmethod
    def take(cls, directory: Path, batch_id: str) -> BatchLock | None:
        """The lock, or None while another process, or another task of this one, holds it.

        Where nothing can be written nobody shares the directory, and the lock is an empty gesture.
        """
        path = directory / f"{batch_id}.lock"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return cls(path, None)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(number)
            return None
        return cls(path, number)

    def release(self, *, ended: bool) -> None:
        """Give it back; with ``ended`` nobody needs its file any more."""
        if self._number is None:
            return
        if ended:
            with contextlib.suppress(OSError):
                self._path.unlink()
        os.close(self._number)

"""Ownership of a batch: the process that holds the lock on its file works on it.

The kernel releases a dead process's locks at once, so there are no leases to wait for and no clocks
to compare. On a network file system without ``flock``, run one server per data directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class BatchLock:
    """The lock of a batch, held from ``acquire`` to ``release``."""

    def __init__(self, path: Path, number: int | None) -> None:
        self._path = path
        self._number = number

    @classmethod
    def acquire(cls, directory: Path, batch_id: str) -> BatchLock | None:
        """Acquire the lock; None if another process, or another task of this one, holds it.

        None, too, if the file cannot be made now, as on a full disk. If the directory is read-only
        it is not shared, and the lock does nothing; so it is where there are no locks.
        """
        path = directory / f"{batch_id}.lock"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            return cls(path, None) if error.errno in _READ_ONLY else None
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(number)
            return None if isinstance(error, BlockingIOError) else cls(path, None)
        return cls(path, number)

    def release(self, *, ended: bool) -> None:
        """Release the lock; with ``ended`` its file is no longer needed."""
        if self._number is None:
            return
        if ended:
            with contextlib.suppress(OSError):
                self._path.unlink()
        os.close(self._number)

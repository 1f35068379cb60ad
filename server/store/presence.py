"""Liveness of the processes that share a data directory.

A process holds a lock on a file of its own, which the kernel releases however the process ends. So
a restarted server sees at once which work has lost its process: there is no lease to wait for and
no clock to trust. The files are in ``processes/`` next to the database.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from pathlib import Path

_DIRECTORY = "processes"


class Presence:
    """This process's own file, locked until ``release``; made on the database's thread."""

    def __init__(self, directory: Path | None) -> None:
        """Create and lock the file; without a directory there are no other processes.

        Raises OSError if the file cannot be written.
        """
        self.name = uuid.uuid4().hex
        self._directory = None if directory is None else directory / _DIRECTORY
        self._file: int | None = None
        if self._directory is not None:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            self._file = _create_locked(self._directory / self.name)
            self._sweep()

    def is_alive(self, name: str) -> bool:
        """Whether the process of that name is alive; false if it never existed."""
        if name == self.name:
            return True
        return self._directory is not None and not _remove_if_free(self._directory / name)

    def release(self) -> None:
        """Unlock and remove the file."""
        if self._file is not None and self._directory is not None:
            (self._directory / self.name).unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _sweep(self) -> None:
        """Remove the files of dead processes."""
        assert self._directory is not None
        for path in self._directory.iterdir():
            if path.name != self.name and not path.name.startswith("."):
                _remove_if_free(path)


def _create_locked(path: Path) -> int:
    # Under another name until it is locked, so that no sweep finds it unlocked.
    hidden = path.with_name(f".{path.name}")
    file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        hidden.rename(path)
    except BaseException:
        os.close(file)
        raise
    return file


def _remove_if_free(path: Path) -> bool:
    """Remove the file if it is not locked; whether it was removed."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        with contextlib.suppress(OSError):
            path.unlink()
        return True
    finally:
        os.close(file)

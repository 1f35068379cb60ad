"""Which of the processes that share a data directory still live.

A process holds a lock on a file of its own, which the kernel lets go of however it ends. So a
restarted server sees at once whose work nobody does any more: no lease to wait for, no clock to
trust. The files lie in ``processes/`` beside the database.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from pathlib import Path

_DIRECTORY = "processes"


class Presence:
    """This process's own file, held until ``leave``; made on the database's thread."""

    def __init__(self, directory: Path | None) -> None:
        """Make and lock the file; without a directory there is nobody else.

        Raises OSError when it cannot be written.
        """
        self.name = uuid.uuid4().hex
        self._directory = None if directory is None else directory / _DIRECTORY
        self._file: int | None = None
        if self._directory is not None:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            self._file = _create_locked(self._directory / self.name)
            self._sweep()

    def lives(self, name: str) -> bool:
        """Whether the process of that name does; one that was never there does not."""
        if name == self.name:
            return True
        return self._directory is not None and not _remove_if_free(self._directory / name)

    def leave(self) -> None:
        """Give the file up."""
        if self._file is not None and self._directory is not None:
            (self._directory / self.name).unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _sweep(self) -> None:
        """Remove the files of those who could not."""
        assert self._directory is not None
        for path in self._directory.iterdir():
            if path.name != self.name and not path.name.startswith("."):
                _remove_if_free(path)


def _create_locked(path: Path) -> int:
    # Under another name until it is locked, so that no sweep finds it free.
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
    """Whether nobody holds the file, which is then gone."""
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

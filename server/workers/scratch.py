"""The supervisor's directory, of sockets and of memory that workers map.

A supervisor that is killed outright cannot take it away: the next one does. Each holds a lock on a
file in its own, which the system lets go when it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

_PREFIX = "quire-workers-"
_LOCK = "lock"


class Scratch:
    """A new directory, for its owner alone (mode 0700), until ``close`` or the process's end."""

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        made = self.path / "made"
        self._lock = made.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        made.rename(self.path / _LOCK)  # nobody finds it before it is locked
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def close(self) -> None:
        """Remove it and all that is in it."""
        self._remove()
        self._lock.close()


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, gone meanwhile, or not ours
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            with (path / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)

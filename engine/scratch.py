"""A process's directory for what others find by a path: sockets, maps of memory, meeting points.

A process that is killed outright cannot take its own away: the next one of its kind does. Each
holds a lock on a file in it, which the system lets go when it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

_LOCK = "lock"


class Scratch:
    """A new directory, for its owner alone (mode 0700), until ``close`` or the process's end.

    Args:
        kind: of process; those of its kind that were killed are tidied up after.
    """

    def __init__(self, kind: str) -> None:
        prefix = f"quire-{kind}-"
        _remove_abandoned(Path(tempfile.gettempdir()), prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        made = self.path / "made"
        self._lock = made.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        made.rename(self.path / _LOCK)  # nobody finds it before it is locked
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def close(self) -> None:
        """Remove it and all that is in it. Idempotent."""
        self._remove()
        self._lock.close()


def _remove_abandoned(folder: Path, prefix: str) -> None:
    for path in folder.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # in use, gone meanwhile, or not ours
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            with (path / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)

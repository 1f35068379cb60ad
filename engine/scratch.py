"""A process's directory for what others find by path: sockets, shared memory, rendezvous files.

A process that is killed cannot remove its own directory, so the next process of its kind does. Each
process holds a lock on a file in its directory, which the kernel releases when the process dies.
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


class ScratchDirectory:
    """A new private directory (mode 0700), removed by ``close`` or at the process's exit.

    Args:
        kind: of process; directories left by killed processes of this kind are removed.
    """

    def __init__(self, kind: str) -> None:
        prefix = f"quire-{kind}-"
        _remove_abandoned(Path(tempfile.gettempdir()), prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        made = self.path / "made"
        self._lock = made.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        made.rename(self.path / _LOCK)  # it becomes visible only once locked
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def close(self) -> None:
        """Remove the directory and its contents. Idempotent."""
        self._remove()
        self._lock.close()


def _remove_abandoned(folder: Path, prefix: str) -> None:
    for path in folder.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # in use, already gone, or not ours
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            with (path / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)

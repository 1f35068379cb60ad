"""Standard output that tells its own failures apart from those of other files and connections."""

from __future__ import annotations

import errno
import os
from typing import IO, Any


class OutputFailed(Exception):
    """Standard output takes no more.

    No ``OSError``: commands blame a file or a server for those. ``reason`` is None if the reader
    has left, which is no failure (``quire complete ... | head``).
    """

    def __init__(self, error: OSError) -> None:
        left = error.errno == errno.EPIPE
        self.reason = None if left else error.strerror or str(error)
        super().__init__(self.reason)


class CheckedOutput:
    """A text stream whose failed writes raise :class:`OutputFailed`; otherwise like ``stream``."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text``. Raises OutputFailed."""
        try:
            return self._stream.write(text)
        except OSError as error:
            raise OutputFailed(error) from error

    def flush(self) -> None:
        """Write what is buffered. Raises OutputFailed."""
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputFailed(error) from error

    def discard(self) -> None:
        """Let what is buffered go nowhere; it would be written, and would fail, at exit again."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

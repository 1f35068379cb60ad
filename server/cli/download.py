"""What ``quire serve`` tells of models that it downloads: the terminal, and who asks the server.

Nothing here happens, or is imported, for models that are there already.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from server.cli.progress import LoadDisplay
from server.settings import Settings

if TYPE_CHECKING:
    from server.http.waiting import WaitingRoom

_LINE_PERIOD_S = 10.0  # a download may take an hour


class Download:
    """Reports a download that happens in the block, and lets a signal end it.

    Args:
        settings: the server's.
        sockets: the server's, listening; they are answered once the download has begun.
    """

    def __init__(self, settings: Settings, sockets: Sequence[socket.socket]) -> None:
        self._settings = settings
        self._sockets = sockets
        self._display = LoadDisplay(settings.log_format, line_period_s=_LINE_PERIOD_S)
        self._room: WaitingRoom | None = None
        self._handlers: dict[signal.Signals, Any] = {}  # those before the block

    def __enter__(self) -> Self:
        # A thread that receives a file cannot be interrupted, and would be waited for. Without a
        # handler, the first process of a container would not get SIGTERM at all.
        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers[number] = signal.signal(number, _exit)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._display.clear()
        if self._room is not None:
            self._room.close()

    def report(self, name: str, done: int, total: int) -> None:
        """Report the progress; see :data:`engine.model_source.DownloadProgress`."""
        what = f"downloading {name}, {_amount(done, total)}"
        self._display(done / total if total else 0.0, what)
        reason = f"The server is not ready: {what}."
        if self._room is None:
            from server.http.waiting import WaitingRoom

            self._room = WaitingRoom(self._settings, self._sockets, reason)
            self._room.open()
        self._room.reason = reason


def _amount(done: int, total: int) -> str:
    """``3.1 of 15.2 GB``; a total of 0 is unknown."""
    unit, size = ("GB", 1e9) if max(done, total) >= 1e9 else ("MB", 1e6)
    return f"{done / size:.1f}" + (f" of {total / size:.1f} {unit}" if total else f" {unit}")


def _exit(number: int, frame: FrameType | None) -> None:
    """End the process at once; the engine's process ends with it."""
    os._exit(0 if number == signal.SIGTERM else 130)

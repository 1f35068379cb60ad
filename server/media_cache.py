"""The newest decoded files, because a conversation sends them again with every turn."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """A decoded file."""

    @property
    def num_bytes(self) -> int:
        """Its size in memory."""
        ...


_File = TypeVar("_File", bound=Sized)


class MediaCache(Generic[_File]):
    """Keeps the files that were used last. Thread-safe.

    Args:
        max_bytes: limit of their sizes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._files: OrderedDict[Hashable, _File] = OrderedDict()  # least recently used first
        self._free_bytes = max_bytes
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], _File]) -> _File:
        """Return the file of this key; if it is not kept, what ``make`` makes.

        Raises what ``make`` raises.
        """
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
                return self._files[key]
        made = make()
        with self._lock:
            if key not in self._files:
                self._files[key] = made
                self._free_bytes -= made.num_bytes
            while self._free_bytes < 0:
                self._free_bytes += self._files.popitem(last=False)[1].num_bytes
        return made

"""Memory for weights: in huge pages if the system grants them, apart from short-lived tensors.

Streaming through gigabytes of small pages misses the TLB at every page. Contiguous weights also
avoid the holes that the temporaries of their making would leave.
"""

from __future__ import annotations

import math
import mmap
import threading

import torch

_CHUNK_BYTES = 64 * 2**20
_LINE_BYTES = 64


class Arena:
    """Allocates tensors that live as long as the program or as they are referenced.

    A chunk returns to the system when its last tensor is freed. Pages are committed when first
    written, so the unused part of a chunk costs nothing. Models may load in several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor with undefined contents that begins on a cache line.

        Raises:
            OSError: the system is out of memory.
        """
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            if self._used + size > len(self._chunk):
                self._chunk = _map(max(size, _CHUNK_BYTES))
                self._used = 0
            taken = self._chunk[self._used : self._used + size]
            self._used += -(-size // _LINE_BYTES) * _LINE_BYTES
        return taken.view(dtype).view(shape)

    def start_new_chunk(self) -> None:
        """Begin a new chunk with the next tensor; this one then lives as long as its tensors."""
        with self._lock:
            self._chunk = torch.empty(0, dtype=torch.uint8)
            self._used = 0


def mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a zeroed tensor in pages of its own, which return to the system as soon as it is
    freed.

    The allocator would keep them for later: after loading a model, holes of hundreds of megabytes
    would remain.

    Raises:
        OSError: the system is out of memory.
    """
    size = math.prod(shape) * dtype.itemsize
    return _map(size)[:size].view(dtype).view(shape)


def _map(size: int) -> torch.Tensor:
    pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)  # keeps the mapping alive

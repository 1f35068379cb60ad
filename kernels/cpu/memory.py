"""Memory for weights: in huge pages where the system grants them, apart from what comes and goes.

A stream through gigabytes of small pages misses the TLB at every page. And weights that lie in one
run leave no holes behind the temporaries of their making.
"""

from __future__ import annotations

import math
import mmap

import torch

_CHUNK_BYTES = 64 * 2**20
_LINE_BYTES = 64


class Arena:
    """Hands out tensors that live as long as the program or as they are referred to.

    A chunk goes back to the system when no tensor of it is left. Pages are taken when first
    written, so what is not handed out of a chunk costs nothing.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with undefined contents that begins on a cache line.

        Raises:
            OSError: the system has no such memory.
        """
        size = math.prod(shape) * dtype.itemsize
        if self._used + size > len(self._chunk):
            self._chunk = _map(max(size, _CHUNK_BYTES))
            self._used = 0
        taken = self._chunk[self._used : self._used + size]
        self._used += -(-size // _LINE_BYTES) * _LINE_BYTES
        return taken.view(dtype).view(shape)

    def leave(self) -> None:
        """Begin a new chunk with the next tensor, so that what is left of this one does not outlive
        its tensors."""
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0


def own_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in pages of its own, zeros; they go back to the system as soon as it is dropped.

    The allocator would keep them for later: read a model through it, and holes of hundreds of
    megabytes stay behind.

    Raises:
        OSError: the system has no such memory.
    """
    size = math.prod(shape) * dtype.itemsize
    return _map(size)[:size].view(dtype).view(shape)


def _map(size: int) -> torch.Tensor:
    pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)  # keeps the mapping alive

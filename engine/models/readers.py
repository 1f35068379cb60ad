"""Threads that read a tensor together, straight to where it belongs.

One thread copies out of the system's cache more slowly than memory takes it, and a disk with deep
queues answers several reads at once. What is in flight is a piece for each thread: bytes go to
their place, or through a buffer of the thread's own where they are cast.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from engine.errors import ModelLoadError
from kernels.cpu.memory import own_pages

PIECE_BYTES = 8 * 2**20
_MAX_THREADS = 4


class Readers:
    """The readers of one checkpoint. Their threads end when nothing refers to them any more."""

    def __init__(self, num_threads: int | None = None) -> None:
        num_threads = num_threads or min(_MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="weights")
        self._own = threading.local()

    def fill(self, path: Path, begin: int, dtype: torch.dtype, into: torch.Tensor) -> None:
        """Fill a contiguous tensor with numbers that lie in a file one after the other.

        Args:
            path: of the file.
            begin: where the first number lies, in bytes.
            dtype: of the file's numbers; they are cast where that of ``into`` is another.
            into: on any device.

        Raises:
            ModelLoadError: the file cannot be read, or ends before they do.
        """
        flat = into.view(-1)
        step = PIECE_BYTES // dtype.itemsize
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            if flat.numel() <= step:
                self._read(descriptor, path, begin, dtype, flat)
                return
            # All of them are waited for, also when one fails: the file is closed behind them.
            pieces = [
                self._pool.submit(
                    self._read, descriptor, path, begin + at * dtype.itemsize, dtype, piece
                )
                for at, piece in zip(range(0, flat.numel(), step), flat.split(step), strict=True)
            ]
            errors = [error for piece in pieces if (error := piece.exception()) is not None]
            if errors:
                raise errors[0]
        finally:
            os.close(descriptor)

    def _read(
        self, descriptor: int, path: Path, begin: int, dtype: torch.dtype, into: torch.Tensor
    ) -> None:
        is_cast = into.dtype != dtype or into.device.type != "cpu"
        raw = self._buffer() if is_cast else into.view(torch.uint8)
        raw = raw[: into.numel() * dtype.itemsize]
        view, done = raw.numpy().data, 0
        while done < len(view):  # a read may give less than was asked for
            try:
                count = os.preadv(descriptor, [view[done:]], begin + done)
            except OSError as error:
                raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
            if count == 0:
                raise ModelLoadError(f"{path}: is cut short")
            done += count
        if is_cast:
            into.copy_(raw.view(dtype))

    def _buffer(self) -> torch.Tensor:
        """The calling thread's own, in pages that go back to the system with it."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = own_pages((PIECE_BYTES,), torch.uint8)
        return self._own.buffer


def read_ahead(path: Path, begin: int, num_bytes: int) -> None:
    """Have the system fetch a part of a file into its cache; a hint, which costs no memory here."""
    if not hasattr(os, "posix_fadvise"):
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return  # it is told of when the part is read
    try:
        os.posix_fadvise(descriptor, begin, num_bytes, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)

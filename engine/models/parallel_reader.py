"""Threads that read a tensor together, directly to its destination.

One thread copies out of the page cache more slowly than memory allows, and a disk with deep queues
serves several reads at once. Each thread has one piece in flight: the bytes go to their
destination, or through the thread's own buffer if they are cast.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from engine.errors import ModelLoadError
from kernels.cpu.memory import mapped_zeros

PIECE_BYTES = 8 * 2**20
_MAX_THREADS = 4


class _ByteRange(NamedTuple):
    """Bytes of a file: a number per row, from ``begin`` on, with a row every ``stride`` bytes."""

    begin: int
    num_bytes: int
    stride: int


class _File(NamedTuple):
    """An open file."""

    descriptor: int
    path: Path

    def read_exactly(self, into: memoryview, begin: int) -> None:
        """Fill ``into`` from offset ``begin``. Raises ModelLoadError."""
        done = 0
        while done < len(into):  # a read may return fewer bytes
            try:
                count = os.preadv(self.descriptor, [into[done:]], begin + done)
            except OSError as error:
                raise ModelLoadError(f"{self.path}: cannot be read: {error.strerror}") from None
            if count == 0:
                raise ModelLoadError(f"{self.path}: is cut short")
            done += count


class ParallelReader:
    """The readers of one checkpoint. Their threads end when nothing references the object."""

    def __init__(self) -> None:
        num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="weights")
        self._own = threading.local()

    def fill(self, path: Path, begin: int, dtype: torch.dtype, into: torch.Tensor) -> None:
        """Fill a contiguous tensor with consecutive numbers of a file.

        Args:
            path: of the file.
            begin: offset of the first number, in bytes.
            dtype: of the file's numbers; they are cast if ``into`` has another.
            into: on any device.

        Raises:
            ModelLoadError: the file cannot be read, or is too short.
        """
        self._fill(
            path, _ByteRange(begin, into.numel() * dtype.itemsize, 0), dtype, into.view(1, -1)
        )

    def fill_columns(
        self, path: Path, begin: int, stride: int, dtype: torch.dtype, into: torch.Tensor
    ) -> None:
        """Fill a contiguous matrix with some columns of a row-major matrix in a file.

        Other columns are not read.

        Args:
            path: of the file.
            begin: offset of the first number in the first row, in bytes.
            stride: bytes from one row of the file to the next.
            dtype, into: as for ``fill``; [rows, columns].

        Raises:
            ModelLoadError: as ``fill`` does.
        """
        self._fill(path, _ByteRange(begin, into.shape[1] * dtype.itemsize, stride), dtype, into)

    def _fill(self, path: Path, run: _ByteRange, dtype: torch.dtype, into: torch.Tensor) -> None:
        """Fill [rows, columns] with a run of bytes for each row."""
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
        file = _File(descriptor, path)
        try:
            pieces = list(_pieces(run, dtype, into))
            if len(pieces) == 1:
                self._read(file, *pieces[0], dtype)
                return
            # Wait for all of them even if one fails, because the file is closed afterwards.
            reads = [self._pool.submit(self._read, file, *piece, dtype) for piece in pieces]
            errors = [error for read in reads if (error := read.exception()) is not None]
            if errors:
                raise errors[0]
        finally:
            os.close(descriptor)

    def _read(self, file: _File, run: _ByteRange, into: torch.Tensor, dtype: torch.dtype) -> None:
        is_cast = into.dtype != dtype or into.device.type != "cpu"
        flat = into.view(-1)
        raw = self._buffer() if is_cast else flat.view(torch.uint8)
        raw = raw[: flat.numel() * dtype.itemsize]
        view = raw.numpy().data
        for row, at in enumerate(range(0, len(view), run.num_bytes)):
            file.read_exactly(view[at : at + run.num_bytes], run.begin + row * run.stride)
        if is_cast:
            flat.copy_(raw.view(dtype))

    def _buffer(self) -> torch.Tensor:
        """The calling thread's own buffer, in pages that return to the system with it."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = mapped_zeros((PIECE_BYTES,), torch.uint8)
        return self._own.buffer


def _pieces(
    run: _ByteRange, dtype: torch.dtype, into: torch.Tensor
) -> Iterator[tuple[_ByteRange, torch.Tensor]]:
    """Split the work into one read per thread at a time: some rows, or a part of one long row."""
    rows, columns = into.shape
    if rows == 1:
        step = PIECE_BYTES // dtype.itemsize
        for at, piece in zip(range(0, columns, step), into.view(-1).split(step), strict=True):
            size = piece.numel() * dtype.itemsize
            yield _ByteRange(run.begin + at * dtype.itemsize, size, 0), piece
        return
    step = max(1, PIECE_BYTES // run.num_bytes)
    for at, piece in zip(range(0, rows, step), into.split(step), strict=True):
        yield run._replace(begin=run.begin + at * run.stride), piece


def read_ahead(path: Path, begin: int, num_bytes: int) -> None:
    """Ask the system to read a part of a file into the page cache; a hint, without memory here."""
    if not hasattr(os, "posix_fadvise"):
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return  # reported when the part is read
    try:
        os.posix_fadvise(descriptor, begin, num_bytes, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)

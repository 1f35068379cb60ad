"""Asynchronous transfers to the device and back: one packed copy a step each way."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

# Transfers in flight at once, above which the host waits for the oldest. A step has a few, and two
# steps may overlap.
_MAX_BUFFERS = 32
_MIN_BUFFER_SIZE = 1 << 16  # minimum size of a buffer
_MAX_JOINED_BYTES = 1 << 20  # of two tensors that are copied together


class _Buffer(NamedTuple):
    """Page-locked memory, and an event for when it has been read."""

    numbers: torch.Tensor  # int32
    is_read: torch.cuda.Event


class Uploads:
    """Sends a step's arrays to the device in one copy from page-locked memory.

    On a CPU the tensors share the arrays' memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: deque[_Buffer] = deque()  # oldest first

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Return the arrays, all int32, as tensors on the device: slices of one buffer on a GPU."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        sizes = [array.size for array in arrays]
        on_device = torch.empty(sum(sizes), dtype=torch.int32, device=self._device)
        self.fill(on_device, arrays)
        return [
            part.view(array.shape)
            for part, array in zip(on_device.split(sizes), arrays, strict=True)
        ]

    def fill(self, target: torch.Tensor, arrays: Sequence[np.ndarray]) -> None:
        """Concatenate the arrays, all int32, into a tensor of their total size."""
        parts = [array.ravel() for array in arrays]
        packed = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if self._device.type == "cpu":
            target.copy_(torch.from_numpy(packed))
            return
        buffer = self._next(packed.size)
        buffer.numbers.numpy()[: packed.size] = packed
        target.copy_(buffer.numbers[: packed.size], non_blocking=True)
        buffer.is_read.record()
        self._buffers.append(buffer)

    def _next(self, size: int) -> _Buffer:
        """Return a buffer that no copy is reading."""
        buffers = self._buffers
        if not buffers or (len(buffers) < _MAX_BUFFERS and not buffers[0].is_read.query()):
            return _Buffer(_pinned(max(size, _MIN_BUFFER_SIZE)), torch.cuda.Event())
        oldest = buffers.popleft()
        oldest.is_read.synchronize()
        if oldest.numbers.numel() < size:
            return oldest._replace(numbers=_pinned(size))
        return oldest


class Downloads:
    """Copies results to the host on a stream of its own, so that the computing stream never waits.

    The computing stream is the current one when this is made.

    On a CPU the tensors are cloned, because the next step may overwrite them before this step's
    results are read.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # Looked up once: a small model's step is bound by the host.
            self._computing = torch.cuda.current_stream(device)
            self._stream = torch.cuda.Stream(device)
            self._context = torch.cuda.stream(self._stream)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> PendingDownload:
        """Start copying the results of the computing stream's work."""
        if self._stream is None:
            return PendingDownload([tensor.clone() for tensor in tensors], None)
        self._stream.wait_stream(self._computing)
        with self._context:
            copies = []
            while tensors:
                copied, tensors = _copy_next(tensors, self._stream)
                copies += copied
            # A blocking event: the waiting thread sleeps and leaves the core to the HTTP process.
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
        return PendingDownload(copies, event)

    def guard(self) -> None:
        """Make the computing stream wait until fetched tensors may be overwritten."""
        if self._stream is not None:
            self._computing.wait_stream(self._stream)


class PendingDownload:
    """Tensors on their way to the host."""

    __slots__ = ("_event", "_tensors")

    def __init__(self, tensors: list[torch.Tensor], event: torch.cuda.Event | None) -> None:
        self._tensors = tensors
        self._event = event

    def wait(self) -> list[torch.Tensor]:
        """Wait for the tensors and return them, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _copy_next(
    tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Start copying the first tensor, or two that lie one after the other; return the copies,
    and the tensors that are left."""
    first, *rest = tensors
    joined = _joined(first, rest[0]) if rest else None
    source = first if joined is None else joined
    source.record_stream(stream)
    copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    copy.copy_(source, non_blocking=True)
    if joined is None:
        return (copy,), rest
    second, *rest = rest
    parts = copy[: first.nbytes].view(first.dtype), copy[-second.nbytes :].view(second.dtype)
    return parts, rest


def _joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes of two vectors of the same memory, which lie close together in this order;
    None of others. A copy costs the host more than the bytes do."""
    begin, then = (each.storage_offset() * each.element_size() for each in (first, second))
    num_bytes = then + second.nbytes - begin
    if not first.nbytes < num_bytes <= _MAX_JOINED_BYTES:
        return None
    if not all(each.dim() == 1 and each.is_contiguous() for each in (first, second)):
        return None
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return None
    return first.view(torch.uint8).as_strided((num_bytes,), (1,))


def _pinned(size: int) -> torch.Tensor:
    """Allocate at least ``size`` page-locked numbers, rounded up to a power of two."""
    return torch.empty(1 << (size - 1).bit_length(), dtype=torch.int32, pin_memory=True)

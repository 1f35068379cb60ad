"""To the device and back without waiting: one packed copy a step each way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

# Steps whose buffers are in use at once: one that runs, one that is launched, one being packed.
_RING = 3


class Uploads:
    """Brings a step's arrays to the device in one copy from page-locked memory.

    On a CPU the arrays are what the tensors look at.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []
        self._events: list[torch.cuda.Event] = []
        self._turn = 0

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """The arrays, all int32, as tensors on the device; slices of one buffer there."""
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
        """Put the arrays, all int32, one after the other into a tensor of their size."""
        packed = np.concatenate([array.ravel() for array in arrays])
        if self._device.type == "cpu":
            target.copy_(torch.from_numpy(packed))
            return
        pinned, event = self._next(packed.size)
        pinned.numpy()[: packed.size] = packed
        target.copy_(pinned[: packed.size], non_blocking=True)
        event.record()

    def _next(self, size: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """A buffer that no copy is reading any more."""
        if not self._buffers:
            self._buffers = [_pinned(1 << 16) for _ in range(_RING)]
            self._events = [torch.cuda.Event() for _ in range(_RING)]
        self._turn = (self._turn + 1) % _RING
        self._events[self._turn].synchronize()
        if self._buffers[self._turn].numel() < size:
            self._buffers[self._turn] = _pinned(1 << (size - 1).bit_length())
        return self._buffers[self._turn], self._events[self._turn]


class Downloads:
    """Brings results to the host beside the stream that computes, so that it never waits.

    On a CPU they are there already, and copied: the next step may be computed in the same place
    before this one's results are read.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        """Start to copy what the current stream will have computed."""
        if self._stream is None:
            return Fetched([tensor.clone() for tensor in tensors], None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = []
            for tensor in tensors:
                tensor.record_stream(self._stream)
                copies.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
                copies[-1].copy_(tensor, non_blocking=True)
            # Blocking: whoever waits sleeps, and leaves the core to the process that speaks HTTP.
            event = torch.cuda.Event(blocking=True)
            event.record()
        return Fetched(copies, event)

    def guard(self) -> None:
        """Let the current stream wait until what was fetched may be overwritten."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class Fetched:
    """Tensors on their way to the host."""

    __slots__ = ("_event", "_tensors")

    def __init__(self, tensors: list[torch.Tensor], event: torch.cuda.Event | None) -> None:
        self._tensors = tensors
        self._event = event

    def wait(self) -> list[torch.Tensor]:
        """The tensors, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int32, pin_memory=True)

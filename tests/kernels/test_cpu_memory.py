"""Memory for weights."""

from __future__ import annotations

import threading

import torch

from kernels.cpu.memory import Arena


def test_tensors_of_several_threads_lie_apart() -> None:
    """A thread may lose its turn anywhere: a collection of garbage runs whatever is due then."""
    arena = Arena()
    arena.empty((8,), torch.float32)
    others: list[torch.Tensor] = []
    other = threading.Thread(target=lambda: others.append(arena.empty((8,), torch.float32)))

    class Interrupted:
        def __init__(self, chunk: torch.Tensor) -> None:
            self._chunk = chunk

        def __len__(self) -> int:
            return len(self._chunk)

        def __getitem__(self, taken: slice) -> torch.Tensor:
            arena._chunk = self._chunk
            other.start()
            other.join(0.1)  # it ends if it may, and must not
            return self._chunk[taken]

    arena._chunk = Interrupted(arena._chunk)
    own = arena.empty((8,), torch.float32)
    other.join()
    assert own.data_ptr() != others[0].data_ptr()

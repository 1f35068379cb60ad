"""What the layers know of other ranks that hold other shares of the same model."""

from __future__ import annotations

from typing import Protocol

import torch


class Peers(Protocol):
    """The ranks of a tensor-parallel group (``engine/parallel``). All of them make the same calls
    in the same order, with tensors of the same shape and dtype."""

    @property
    def size(self) -> int:
        """How many they are."""
        ...

    def all_reduce(self, x: torch.Tensor, /) -> torch.Tensor:
        """The sum over ranks, the same bits on each; ``x`` is overwritten."""
        ...

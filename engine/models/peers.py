"""The layers' interface to the ranks with the other shards of the model."""

from __future__ import annotations

from typing import Protocol

import torch


class Peers(Protocol):
    """The ranks of a tensor-parallel group (``engine/parallel``).

    All of them make the same calls in the same order, with tensors of the same shape and dtype.
    """

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, x: torch.Tensor, /) -> torch.Tensor:
        """Return the sum over ranks, with the same bits on each; ``x`` is overwritten."""
        ...

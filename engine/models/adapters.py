"""The layers' interface to LoRA adapters, which add to their outputs (``engine/lora``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch


class LoraDelta(NamedTuple):
    """What one adapter adds to a weight, ``up^T down``, and for which tokens."""

    tokens: torch.Tensor  # [m] int64, of the step
    down: torch.Tensor  # [rank, inputs]
    up: torch.Tensor  # [rank, outputs]


class Adapters(Protocol):
    """The adapters of a step's tokens."""

    def add(self, out: torch.Tensor, x: torch.Tensor, parameter: str, /) -> torch.Tensor:
        """Add each token's delta to ``out``, the layer's output for ``x``, in place."""
        ...

    def deltas(self, parameter: str, /) -> Iterator[LoraDelta]:
        """Yield the deltas of a parameter that is not applied as a single product."""
        ...


def project(
    linear: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    adapters: Adapters | None,
    parameter: str,
) -> torch.Tensor:
    """Apply a linear layer and the tokens' adapters: [n, inputs] -> [n, outputs]."""
    out = linear(x)
    return out if adapters is None else adapters.add(out, x, parameter)

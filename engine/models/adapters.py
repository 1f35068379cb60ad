"""What the layers know of adapters: something that adds to their results (``engine/lora``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch


class Change(NamedTuple):
    """What one adapter adds to a weight, ``up^T down``, and for which tokens."""

    tokens: torch.Tensor  # [m] int64, of the step
    down: torch.Tensor  # [rank, inputs]
    up: torch.Tensor  # [rank, outputs]


class Adapters(Protocol):
    """The adapters of a step, to its linear layers."""

    def add(self, out: torch.Tensor, x: torch.Tensor, parameter: str, /) -> torch.Tensor:
        """``out``, what a layer gave for ``x``, with each token's delta added in place."""
        ...

    def changes(self, parameter: str, /) -> Iterator[Change]:
        """What is added to a parameter, where it is not applied as one product."""
        ...


def project(
    linear: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    adapters: Adapters | None,
    parameter: str,
) -> torch.Tensor:
    """What a linear layer and the tokens' adapters make of ``x``: [n, inputs] -> [n, outputs]."""
    out = linear(x)
    return out if adapters is None else adapters.add(out, x, parameter)

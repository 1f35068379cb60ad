"""What a runner asks of the other ranks when it captures a step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import msgspec


class GraphKey(msgspec.Struct, frozen=True, array_like=True):
    """Names a captured step, the same on all ranks."""

    num_rows: int  # padding included
    num_tokens: int | None = None  # padding included; None: a decode step, captured with its logits
    adapted: bool = False  # whether any row has an adapter


class NotCapturedError(RuntimeError):
    """A step cannot be captured; what was launched before the capture began has run."""


class StepPeers(Protocol):
    """The ranks with the other shards of the model."""

    def capturing(self, graph: GraphKey, /) -> AbstractContextManager[None]:
        """Have the others capture a step while the caller captures it.

        Raises:
            NotCapturedError: one of them could not, or the caller could not.
            EngineDead: one is gone, or the caller failed otherwise: the ranks are out of step then.
        """
        ...


def capturing(peers: StepPeers | None, graph: GraphKey) -> AbstractContextManager[None]:
    """See ``StepPeers.capturing``; without other ranks there is nobody to ask."""
    return nullcontext() if peers is None else peers.capturing(graph)

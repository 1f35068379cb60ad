"""A substitute for CUDA graphs without a GPU: the captured function is called again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine.runner.graphs import Replay


def called_again(function: Callable[[], Any]) -> tuple[Replay, Any]:
    """See ``engine.runner.graphs.Capture``. The function knows as much of the batch as a graph."""
    left = function()

    def replay() -> None:
        for place, fresh in zip(_tensors(left), _tensors(function()), strict=True):
            place.copy_(fresh)

    return replay, left


def _tensors(left: Any) -> Iterator[torch.Tensor]:
    if isinstance(left, torch.Tensor):
        yield left
    elif isinstance(left, tuple):
        for part in left:
            yield from _tensors(part)

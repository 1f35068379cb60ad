"""What stands for a CUDA graph where there is none: a function that is called again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine.runner.graphs import Replay


def called_again(function: Callable[[], Any]) -> tuple[Replay, Any]:
    """See ``engine.runner.graphs.Capture``. What the function knows of the batch, a graph would."""
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

"""The residual stream of all windows between two layers, in files.

Each layer reads one file and writes the next, a few windows at a time. Memory holds only those, and
a run that is interrupted within a layer finds that layer's inputs unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch


class ActivationFiles:
    """Streams by name, each [windows, tokens, hidden_size] float32.

    Args:
        directory: where their files are; it must exist.
        shapes: the shape of each. A stream without windows has no file.
        batch: the number of windows read together.
    """

    def __init__(
        self, directory: Path, shapes: dict[str, tuple[int, int, int]], batch: int
    ) -> None:
        self._directory = directory
        self._shapes = shapes
        self._batch = batch

    def read(self, name: str, layer: int) -> Iterator[torch.Tensor]:
        """The inputs of layer ``layer``, in batches [up to batch, tokens, hidden_size]."""
        count, *shape = self._shapes[name]
        if not count:
            return
        with self._path(name, layer).open("rb") as file:
            for begin in range(0, count, self._batch):
                x = torch.empty(min(self._batch, count - begin), *shape)
                if file.readinto(x.view(-1).numpy().data.cast("B")) != x.nbytes:
                    raise OSError(None, "is cut short", file.name)
                yield x

    def write(self, name: str, layer: int, batches: Iterable[torch.Tensor]) -> None:
        """Write the inputs of layer ``layer``.

        Raises:
            OSError: the disk is full.
        """
        if not self._shapes[name][0]:
            return
        with self._path(name, layer).open("wb") as file:
            for x in batches:
                file.write(x.contiguous().view(-1).numpy().data)

    def exist(self, layer: int) -> bool:
        """Whether all inputs of layer ``layer`` have been written."""
        return all(
            not shape[0]
            or ((path := self._path(name, layer)).is_file() and _size(path) == 4 * math.prod(shape))
            for name, shape in self._shapes.items()
        )

    def drop(self, layer: int) -> None:
        """Delete the inputs of layer ``layer``."""
        for name in self._shapes:
            self._path(name, layer).unlink(missing_ok=True)

    def _path(self, name: str, layer: int) -> Path:
        return self._directory / f"{name}-{layer:05}.f32"


def _size(path: Path) -> int:
    return path.stat().st_size

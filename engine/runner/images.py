"""Image embeddings for the tokens of a step; each image is embedded once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Set
from typing import NamedTuple

import numpy as np
import torch

from engine.errors import RequestFailed
from engine.images.nouns import Image, ImageRules
from engine.images.positions import cells
from engine.models.step_state import ImageTokens
from engine.models.vision.tower import ImageStates, VisionTower
from engine.runner.device_errors import translated_errors
from engine.runner.inputs import Ends, HostBatch
from engine.runner.rows import RowTable
from engine.runner.transfer import Uploads
from kernels.sending import to_device


class _Seen(NamedTuple):
    """The cells of an image that a step computes."""

    image: Image
    places: np.ndarray  # [n], in the step
    begin: int  # first of these cells, in the image
    behind: int  # the prompt position after the image's last cell


class Turning(NamedTuple):
    """The rotary positions of a step's tokens; see ``Turns``."""

    host: np.ndarray  # [3, N] int32
    device: torch.Tensor  # int64


class StepView(NamedTuple):
    """What a step needs to know of its images."""

    tokens: ImageTokens | None = None  # None: no token of the step is in an image
    places: np.ndarray | None = None  # [n] int32, those of ``tokens``, on the host
    ends: Ends | None = None  # how far tokens attend; None: plain causal attention
    turns: Turning | None = None  # None: the rotary positions are the tokens' positions


NOTHING_SEEN = StepView()


class ImageReader:
    """Embeds an image when its first token is computed, and caches the embeddings.

    The cache serves the image's later chunks and other prompts with the same image. An image is
    embedded by itself, so its embeddings do not depend on the rest of the step.

    Args:
        tower: the vision tower.
        rules: the model's image rules.
        rows: the runner's.
        device: the tower's.
        most_cells: capacity of the cache; one step may exceed it.
    """

    def __init__(
        self,
        tower: VisionTower,
        rules: ImageRules,
        rows: RowTable,
        device: torch.device,
        most_cells: int,
    ) -> None:
        self._tower = tower
        self._cell = rules.cell
        self._sees_both_ways = rules.sees_both_ways
        self._rows = rows
        self._device = device
        self._most_cells = most_cells
        self._num_cells = 0
        self._wanted: Set[bytes] = frozenset()  # digests that must not be evicted
        self._kept: OrderedDict[bytes, ImageStates] = OrderedDict()  # least recently used first

    def sees(self, batch: HostBatch) -> bool:
        """Return whether the step has a token of an image."""
        return next(self._seen(batch), None) is not None

    def read(self, batch: HostBatch, uploads: Uploads) -> StepView:
        """Return what the step needs; embeds images that are not cached."""
        if not self._rows.pictured:
            return NOTHING_SEEN
        turns, turning = None if self._rows.turns is None else self._rows.turns.of(batch), None
        if turns is not None:
            turning = Turning(turns, uploads.send((turns,))[0].long())
        seen = list(self._seen(batch))
        if not seen:
            return StepView(turns=turning)
        places, ends = np.concatenate([where for _, where, *_ in seen]), None
        if self._sees_both_ways:
            on_host = _ends(batch, seen)
            ends = Ends(on_host, *uploads.send((on_host,)))
        return StepView(self._tokens(seen, places), places.astype(np.int32), ends, turning)

    def _tokens(self, seen: list[_Seen], places: np.ndarray) -> ImageTokens:
        """Return the embeddings that replace the step's image tokens."""
        parts = []
        for image, where, begin, _ in seen:
            states = self._states(image)
            end = begin + where.size
            parts.append([each[begin:end] for each in (states.embeddings, *states.deep)])
        self._drop()
        embeddings, *deep = (torch.cat(each) for each in zip(*parts, strict=True))
        where = to_device(torch.from_numpy(places), self._device)
        return ImageTokens(where, embeddings, tuple(deep))

    @property
    def room(self) -> int:
        """See ``ImagesAhead.room``."""
        return self._most_cells

    def num_cells(self, image: Image) -> int:
        """See ``ImagesAhead.num_cells``."""
        return (image.height // self._cell) * (image.width // self._cell)

    def has(self, image: Image) -> bool:
        """See ``ImagesAhead.has``."""
        return image.digest in self._kept

    def keep(self, digests: Set[bytes]) -> None:
        """See ``ImagesAhead.keep``."""
        self._wanted = digests
        self._drop()

    def read_ahead(self, image: Image) -> Iterator[None]:
        """See ``ImagesAhead.read_ahead``."""
        pieces = self._tower.pieces(self._pixels(image))
        while True:
            with translated_errors(), torch.inference_mode():
                try:
                    next(pieces)
                except StopIteration as done:
                    self._take(image, done.value)
                    return
            yield

    def _take(self, image: Image, states: ImageStates) -> None:
        if not all(each.isfinite().all() for each in (states.embeddings, *states.deep)):
            raise RequestFailed("its embeddings are not finite")
        self._add(image, states)
        self._kept.move_to_end(image.digest)
        self._drop()

    def _seen(self, batch: HostBatch) -> Iterator[_Seen]:
        pictured = self._rows.pictured
        if not pictured:
            return
        bounds, starts = batch.query_start.tolist(), batch.starts.tolist()
        for row, slot in enumerate(batch.slots.tolist()):
            if slot not in pictured:
                continue
            first, start = bounds[row], starts[row]
            end = start + bounds[row + 1] - first
            for image in self._rows.requests[slot].images:
                if image.start >= end or image.start + image.num_tokens <= start:
                    continue
                in_prompt = cells(image, self._cell)
                begin, behind = np.searchsorted(in_prompt, (start, end)).tolist()
                if begin < behind:
                    here = in_prompt[begin:behind] - start + first
                    yield _Seen(image, here, begin, int(in_prompt[-1]) + 1)

    def _states(self, image: Image) -> ImageStates:
        found = self._kept.get(image.digest)
        if found is None:
            found = self._tower.embed(self._pixels(image))
            self._add(image, found)
        self._kept.move_to_end(image.digest)
        return found

    def _pixels(self, image: Image) -> torch.Tensor:
        shape = (image.height, image.width, 3)
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(shape)
        return to_device(pixels, self._device)

    def _add(self, image: Image, states: ImageStates) -> None:
        if image.digest not in self._kept:  # a step may have embedded it during the read-ahead
            self._kept[image.digest] = states
            self._num_cells += states.embeddings.shape[0]

    def _drop(self) -> None:
        """Evict the least recently used images until the rest fits.

        Wanted images and the most recently used one stay.
        """
        if self._num_cells <= self._most_cells:
            return
        *earlier, _ = self._kept
        for digest in earlier:
            if digest not in self._wanted:
                self._num_cells -= self._kept.pop(digest).embeddings.shape[0]
                if self._num_cells <= self._most_cells:
                    return


def _ends(batch: HostBatch, seen: list[_Seen]) -> np.ndarray:
    """[N] int32, see ``Ends``: the tokens of an image attend to all of it."""
    found = batch.positions + np.int32(1)
    for _, where, _, behind in seen:
        found[where] = behind
    return found

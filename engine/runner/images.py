"""Embeddings of images and audio for the tokens of a step; each item is embedded once.

What is called an image here may be an audio clip.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.errors import RequestFailed
from engine.media import Media
from engine.models.step_state import StepImageEmbeddings
from engine.models.vision.tower import ImageEmbeddings, run_to_end
from engine.runner.device_errors import translated_errors
from engine.runner.inputs import AttentionEnds, HostBatch
from engine.runner.media_encoders import MediaEncoder
from engine.runner.rows import RowTable
from engine.runner.transfer import Uploads
from kernels.transfer import to_device


class _StepImage(NamedTuple):
    """The cells of an image that a step computes."""

    image: Media
    places: np.ndarray  # [n], in the step
    begin: int  # first of these cells, in the image
    end: int  # the prompt position after the image's last cell


class RotaryPositions(NamedTuple):
    """The rotary positions of a step's tokens; see ``MRopePositions``."""

    host: np.ndarray  # [3, N] int32
    device: torch.Tensor  # int64


class StepImages(NamedTuple):
    """What a step needs to know of its images."""

    tokens: StepImageEmbeddings | None = None  # None: no token of the step is in an image
    places: np.ndarray | None = None  # [n] int32, those of ``tokens``, on the host
    # How far tokens attend; None: plain causal attention.
    attention_ends: AttentionEnds | None = None
    rotary_positions: RotaryPositions | None = None  # None: they are the tokens' positions


NO_IMAGES = StepImages()


class MediaEmbedder:
    """Embeds an image when its first token is computed, and caches the embeddings.

    The cache serves the image's later chunks and other prompts with the same image. An image is
    embedded by itself, so its embeddings do not depend on the rest of the step.

    Args:
        encoders: by the type of what they embed; at least one.
        rows: the runner's.
        device: the encoders'.
        max_cells: capacity of the cache; one step may exceed it.
    """

    def __init__(
        self,
        encoders: Mapping[type[Media], MediaEncoder[Any]],
        rows: RowTable,
        device: torch.device,
        max_cells: int,
    ) -> None:
        self._encoders = encoders
        self._is_bidirectional = any(each.is_bidirectional for each in encoders.values())
        self._rows = rows
        self._device = device
        self._max_cells = max_cells
        self._num_cells = 0
        self._pinned: Set[bytes] = frozenset()  # digests that must not be evicted
        self._cache: OrderedDict[bytes, ImageEmbeddings] = OrderedDict()  # oldest use first

    def has_image_tokens(self, batch: HostBatch) -> bool:
        """Return whether the step has a token of an image."""
        return next(self._step_images(batch), None) is not None

    def embed(self, batch: HostBatch, uploads: Uploads) -> StepImages:
        """Return what the step needs; embeds images that are not cached."""
        if not self._rows.media_slots:
            return NO_IMAGES
        turns, turning = None if self._rows.mrope is None else self._rows.mrope.of(batch), None
        if turns is not None:
            turning = RotaryPositions(turns, uploads.send((turns,))[0].long())
        seen = list(self._step_images(batch))
        if not seen:
            return StepImages(rotary_positions=turning)
        places, ends = np.concatenate([where for _, where, *_ in seen]), None
        if self._is_bidirectional:
            on_host = self._ends(batch, seen)
            ends = AttentionEnds(on_host, *uploads.send((on_host,)))
        return StepImages(self._tokens(seen, places), places.astype(np.int32), ends, turning)

    def _tokens(self, seen: list[_StepImage], places: np.ndarray) -> StepImageEmbeddings:
        """Return the embeddings that replace the step's image tokens."""
        parts = []
        for image, where, begin, _ in seen:
            states = self._states(image)
            end = begin + where.size
            parts.append([each[begin:end] for each in (states.embeddings, *states.deepstack)])
        self._evict()
        embeddings, *deep = (torch.cat(each) for each in zip(*parts, strict=True))
        where = to_device(torch.from_numpy(places), self._device)
        return StepImageEmbeddings(where, embeddings, tuple(deep))

    @property
    def capacity(self) -> int:
        """See ``ImagePrefetcher.capacity``."""
        return self._max_cells

    def num_cells(self, image: Media) -> int:
        """See ``ImagePrefetcher.num_cells``."""
        return self._encoders[type(image)].num_cells(image)

    def is_cached(self, image: Media) -> bool:
        """See ``ImagePrefetcher.is_cached``."""
        return image.digest in self._cache

    def pin(self, digests: Set[bytes]) -> None:
        """See ``ImagePrefetcher.pin``."""
        self._pinned = digests
        self._evict()

    def prefetch(self, image: Media) -> Iterator[None]:
        """See ``ImagePrefetcher.prefetch``."""
        pieces = self._encoders[type(image)].embed_chunks(image)
        while True:
            with translated_errors(), torch.inference_mode():
                try:
                    next(pieces)
                except StopIteration as done:
                    self._take(image, done.value)
                    return
            yield

    def _take(self, image: Media, states: ImageEmbeddings) -> None:
        if not all(each.isfinite().all() for each in (states.embeddings, *states.deepstack)):
            raise RequestFailed("its embeddings are not finite")
        self._add(image, states)
        self._cache.move_to_end(image.digest)
        self._evict()

    def _step_images(self, batch: HostBatch) -> Iterator[_StepImage]:
        pictured = self._rows.media_slots
        if not pictured:
            return
        bounds, starts = batch.query_start.tolist(), batch.starts.tolist()
        for row, slot in enumerate(batch.slots.tolist()):
            if slot not in pictured:
                continue
            first, start = bounds[row], starts[row]
            end = start + bounds[row + 1] - first
            for image in self._rows.requests[slot].media:
                if image.start >= end or image.start + image.num_tokens <= start:
                    continue
                in_prompt = self._encoders[type(image)].places(image)
                begin, behind = np.searchsorted(in_prompt, (start, end)).tolist()
                if begin < behind:
                    here = in_prompt[begin:behind] - start + first
                    yield _StepImage(image, here, begin, int(in_prompt[-1]) + 1)

    def _states(self, image: Media) -> ImageEmbeddings:
        found = self._cache.get(image.digest)
        if found is None:
            found = run_to_end(self._encoders[type(image)].embed_chunks(image))
            self._add(image, found)
        self._cache.move_to_end(image.digest)
        return found

    def _add(self, image: Media, states: ImageEmbeddings) -> None:
        if image.digest not in self._cache:  # a step may have embedded it during the read-ahead
            self._cache[image.digest] = states
            self._num_cells += states.embeddings.shape[0]

    def _evict(self) -> None:
        """Evict the least recently used images until the rest fits.

        Wanted images and the most recently used one stay.
        """
        if self._num_cells <= self._max_cells:
            return
        *earlier, _ = self._cache
        for digest in earlier:
            if digest not in self._pinned:
                self._num_cells -= self._cache.pop(digest).embeddings.shape[0]
                if self._num_cells <= self._max_cells:
                    return

    def _ends(self, batch: HostBatch, seen: list[_StepImage]) -> np.ndarray:
        """[N] int32, see ``AttentionEnds``: the tokens of an image attend to all of it."""
        found = batch.positions + np.int32(1)
        for image, where, _, behind in seen:
            if self._encoders[type(image)].is_bidirectional:
                found[where] = behind
        return found

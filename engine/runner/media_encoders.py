"""What embeds the images and the audio of prompts, behind one interface."""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from engine.audio.types import AudioClip
from engine.images.positions import cells
from engine.images.types import Image, ImageRules
from engine.models.audio.encoder import AudioEncoder
from engine.models.vision.tower import ImageEmbeddings, VisionTower
from kernels.transfer import to_device

_Item = TypeVar("_Item", contravariant=True)


class MediaEncoder(Protocol, Generic[_Item]):
    """Embeds items of one kind, each by itself."""

    @property
    def is_bidirectional(self) -> bool:
        """Whether the tokens of an item attend to all of it."""
        ...

    def num_cells(self, item: _Item) -> int:
        """Return the number of an item's embeddings."""
        ...

    def places(self, item: _Item) -> np.ndarray:
        """Return the prompt places of these: [num_cells] int64, ascending."""
        ...

    def embed_chunks(self, item: _Item) -> Generator[None, None, ImageEmbeddings]:
        """Embed an item in pieces; see ``VisionTower.embed_chunks``."""
        ...


class ImageEncoder:
    """A vision tower as ``MediaEncoder``.

    Args:
        tower: the vision tower.
        rules: the model's image rules.
        device: the tower's.
    """

    def __init__(self, tower: VisionTower, rules: ImageRules, device: torch.device) -> None:
        self._tower = tower
        self._cell = rules.cell
        self.is_bidirectional = rules.is_bidirectional
        self._device = device

    def num_cells(self, item: Image) -> int:
        """See ``MediaEncoder``."""
        if item.region is not None:
            return item.num_tokens
        return (item.height // self._cell) * (item.width // self._cell)

    def places(self, item: Image) -> np.ndarray:
        """See ``MediaEncoder``."""
        return cells(item, self._cell)

    def embed_chunks(self, item: Image) -> Generator[None, None, ImageEmbeddings]:
        """See ``MediaEncoder``."""
        shape = (item.height, item.width, 3)
        if item.num_frames > 1:
            shape = (item.num_frames, *shape)
        pixels = torch.frombuffer(bytearray(item.pixels), dtype=torch.uint8).view(shape)
        return self._tower.embed_chunks(to_device(pixels, self._device), item.region)


class ClipEncoder:
    """An audio encoder as ``MediaEncoder``.

    Args:
        encoder: the audio encoder.
        device: the encoder's.
    """

    is_bidirectional = False

    def __init__(self, encoder: AudioEncoder, device: torch.device) -> None:
        self._encoder = encoder
        self._device = device

    def num_cells(self, item: AudioClip) -> int:
        """See ``MediaEncoder``."""
        return item.num_tokens

    def places(self, item: AudioClip) -> np.ndarray:
        """See ``MediaEncoder``."""
        return np.arange(item.start, item.start + item.num_tokens)

    def embed_chunks(self, item: AudioClip) -> Generator[None, None, ImageEmbeddings]:
        """See ``MediaEncoder``."""
        samples = torch.frombuffer(bytearray(item.samples), dtype=torch.float32)
        return self._encoder.embed_chunks(to_device(samples, self._device))

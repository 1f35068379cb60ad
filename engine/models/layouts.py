"""How a checkpoint may lay a tensor out other than the decoder does."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.models.spec import DecoderSpec


class Layout(Protocol):
    """A checkpoint's own order of a parameter's numbers."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the checkpoint of what has ``shape`` here."""
        ...

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """The tensor as the decoder has it."""
        ...


class Transposed:
    """[inputs, outputs], as GPT-2's layers hold their weights."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Layout``."""
        return shape[::-1]

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """See ``Layout``."""
        return stored.T


class HeadByHead:
    """Query, key and value of one head after those of another, as GPT-NeoX fuses them."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Layout``."""
        return shape

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """See ``Layout``."""
        heads = stored.unflatten(0, (spec.num_heads, 3, spec.head_dim))
        return heads.transpose(0, 1).reshape(stored.shape)

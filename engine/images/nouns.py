"""The nouns of images. See ``engine/types.py``."""

from __future__ import annotations

from typing import Literal

import msgspec


class AreaScaling(msgspec.Struct, frozen=True, tag="area"):
    """Sides are rounded to whole cells; an image is scaled where its area lies outside of these
    bounds (Qwen2-VL, Wang et al. 2024)."""

    min_pixels: int
    max_pixels: int


class EdgeScaling(msgspec.Struct, frozen=True, tag="edge"):
    """An image is scaled down to the longest side, and its sides go up to whole cells (Pixtral,
    Agrawal et al. 2024)."""

    longest: int  # pixels


class FixedScaling(msgspec.Struct, frozen=True, tag="fixed"):
    """Every image is seen as a square of one size: its shorter side is scaled to that and the
    middle cut out (CLIP), or without ``crop`` each side is scaled to it (SigLIP). What is left
    below and to the right of whole cells is not seen."""

    side: int  # pixels, whole cells
    crop: bool


class BudgetScaling(msgspec.Struct, frozen=True, tag="budget"):
    """An image is scaled, up or down, to as many whole cells as this budget has room for, its
    shape kept but for parts of cells (Gemma 4)."""

    max_cells: int


Scaling = AreaScaling | EdgeScaling | FixedScaling | BudgetScaling
Resampling = Literal["bicubic", "bilinear"]


class Rewriting(msgspec.Struct, frozen=True):
    """What a chat template writes for an image, and what a model reads in its place: it is put
    there before the prompt is tokenised, as it may make other tokens of the text around."""

    written: str
    read: str  # with one spelling of ``ImageRules.token_id``

    def apply(self, text: str) -> str:
        """What a template has written, as the model reads it."""
        return text.replace(self.written, self.read)


class ImageRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a model takes images: how large it sees them, and which tokens stand for them.

    A chat template writes ``token_id`` once for each image, or what ``rewriting`` makes it of. In
    the prompt that the model reads there is one for each cell, row by row; where it has them,
    ``row_end_id`` ends each row but the last, and ``end_id`` that one.
    """

    token_id: int
    cell: int  # pixels, the side of the square that becomes one token
    scaling: Scaling
    resampling: Resampling = "bicubic"
    rewriting: Rewriting | None = None
    row_end_id: int | None = None
    end_id: int | None = None
    max_images: int  # in one prompt
    # Its tokens see each other, those behind them too: all of an image is computed in one step.
    sees_both_ways: bool = False


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """An image in a prompt, in the size in which the model sees it. Crosses the boundary."""

    start: int  # index of its first token in the prompt
    num_tokens: int  # from there on, those that end its rows included
    height: int  # pixels, whole cells
    width: int
    pixels: bytes  # height * width * 3, RGB
    digest: bytes  # of the size and the pixels

    def span(self, cell: int) -> tuple[int, int]:
        """The places in the prompt of its first cell, of so many pixels a side, and behind its
        last."""
        rows, columns = self.height // cell, self.width // cell
        return self.start, self.start + (rows - 1) * (self.num_tokens // rows) + columns

    def __repr__(self) -> str:  # without the pixels: requests may find their way into a log
        shape = f"{self.width} x {self.height}"
        return f"Image({shape} pixels, {self.num_tokens} tokens from {self.start})"

"""Data types of images; see ``engine/types.py``."""

from __future__ import annotations

from typing import Literal

import msgspec


class AreaScaling(msgspec.Struct, frozen=True, tag="area"):
    """Sides are rounded to whole cells, and the image is scaled if its area is outside these
    bounds (Qwen2-VL, Wang et al. 2024)."""

    min_pixels: int
    max_pixels: int


class EdgeScaling(msgspec.Struct, frozen=True, tag="edge"):
    """The image is scaled down to the longest side, and its sides are rounded up to whole cells
    (Pixtral, Agrawal et al. 2024)."""

    longest: int  # pixels


class FixedScaling(msgspec.Struct, frozen=True, tag="fixed"):
    """Every image becomes a square of the same size.

    With ``crop`` the shorter side is scaled to it and the centre cropped (CLIP); otherwise each
    side is scaled to it (SigLIP). A remainder below or to the right of whole cells is dropped.
    """

    side: int  # pixels, whole cells
    crop: bool


class BudgetScaling(msgspec.Struct, frozen=True, tag="budget"):
    """The image is scaled, up or down, to as many whole cells as the budget allows, and keeps
    its aspect ratio up to rounding to cells (Gemma 4)."""

    max_cells: int


Scaling = AreaScaling | EdgeScaling | FixedScaling | BudgetScaling
Resampling = Literal["bicubic", "bilinear"]


class PlaceholderRewrite(msgspec.Struct, frozen=True):
    """Replaces what a chat template writes for an image by what the model reads.

    It is applied before tokenisation, because it may change the tokens of the surrounding text.
    """

    template_text: str
    model_text: str  # contains ``ImageRules.token_id`` once, as text

    def apply(self, text: str) -> str:
        """Rewrite a template's output."""
        return text.replace(self.template_text, self.model_text)


class ImageRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a model takes images: their sizes, and the tokens that represent them.

    A chat template writes ``token_id`` once for each image, possibly through ``rewriting``. The
    model's prompt has one for each cell, row by row. If they are set, ``row_end_id`` ends each row
    except the last, and ``end_id`` the last one.
    """

    token_id: int
    cell: int  # pixels, the side of the square that becomes one token
    scaling: Scaling
    resampling: Resampling = "bicubic"
    rewriting: PlaceholderRewrite | None = None
    row_end_id: int | None = None
    end_id: int | None = None
    max_images: int  # per prompt
    # Image tokens attend to each other in both directions: an image is computed within one step.
    is_bidirectional: bool = False


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """An image in a prompt, in the model's size. Crosses the process boundary."""

    start: int  # index of its first token in the prompt
    num_tokens: int  # from there on, row ends included
    height: int  # pixels, whole cells
    width: int
    pixels: bytes  # height * width * 3, RGB
    digest: bytes  # of the size and the pixels

    def span(self, cell: int) -> tuple[int, int]:
        """Return the range of prompt places from its first cell to one past its last; ``cell``
        is a cell's side in pixels."""
        rows, columns = self.height // cell, self.width // cell
        return self.start, self.start + (rows - 1) * (self.num_tokens // rows) + columns

    def __repr__(self) -> str:  # without the pixels, as requests may be logged
        shape = f"{self.width} x {self.height}"
        return f"Image({shape} pixels, {self.num_tokens} tokens from {self.start})"

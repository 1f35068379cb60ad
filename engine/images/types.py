"""Data types of images; see ``engine/types.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

MAX_TILED_SIDE = 4096  # pixels; Idefics3's limit before an image is cut


class AreaScaling(msgspec.Struct, frozen=True, tag="area"):
    """Sides are rounded to whole cells, and the image is scaled if its area is outside these
    bounds (Qwen2-VL, Wang et al. 2024).

    With ``growing``, an image thinner than a cell is first scaled to one: by one factor for both
    sides, which are cut to whole pixels (GLM-4.1V), or the thin side exactly and the other rounded
    (PaddleOCR-VL).
    """

    min_pixels: int
    max_pixels: int
    num_frames: int = 1  # by which an image's pixels are multiplied before they are compared
    growing: Literal["cut", "rounded"] | None = None


class EdgeScaling(msgspec.Struct, frozen=True, tag="edge"):
    """The image is scaled down to the longest side, and its sides are rounded up to whole cells
    (Pixtral, Agrawal et al. 2024)."""

    longest: int  # pixels


class PaddedScaling(msgspec.Struct, frozen=True, tag="padded"):
    """The image is scaled down to the most patches and the longest side, and black pixels below and
    to the right complete its cells (MoonViT, Kimi Team 2025)."""

    patch: int  # pixels, a side
    max_patches: int  # as they are counted before cells are completed
    max_side: int  # patches
    max_cells: int  # the most of any image


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


class TileScaling(msgspec.Struct, frozen=True, tag="tiles"):
    """The longer side is scaled to ``longest``, both are rounded up to whole tiles, and the image
    is cut into these; the whole image, scaled to one tile, follows (Idefics3, Laurençon et al.
    2024). A remainder below or to the right of a tile's whole cells is dropped.
    """

    side: int  # of a tile, in pixels
    longest: int  # pixels
    cuts: bool = True  # otherwise there is only the whole image

    @property
    def max_tiles(self) -> int:
        """The most tiles of an image, the whole one included."""
        longest = min(self.longest, MAX_TILED_SIDE)
        across = -(-(longest + longest % 2) // self.side)  # sides are rounded to even numbers
        return across**2 + 1 if self.cuts and across > 1 else 1


class GridScaling(msgspec.Struct, frozen=True, tag="grid"):
    """The image is scaled to the grid of tiles whose shape is closest to its own and cut into
    these; if there are several, the whole image, scaled to one tile, follows (InternVL 1.5, Chen
    et al. 2024).
    """

    side: int  # of a tile, in pixels
    min_cut: int  # tiles, without the whole image
    max_cut: int
    # Instead of the closest shape: the grid in which the image is scaled up least, keeping its
    # shape, or if it fits into none, scaled down least (Command A Vision).
    fits: bool = False

    @property
    def max_tiles(self) -> int:
        """The most tiles of an image, the whole one included."""
        return self.max_cut + 1 if self.max_cut > 1 else 1


class CornerScaling(msgspec.Struct, frozen=True, tag="corner"):
    """The image is scaled, keeping its shape, to the canvas of whole tiles on which it is scaled up
    least, or if it fits on none, scaled down least. It lies in the upper left corner; the rest is
    black. The canvas is cut into tiles; if there are several, the whole image, both sides scaled to
    one tile, follows (Llama 4).
    """

    side: int  # of a tile, in pixels
    max_cut: int  # tiles, without the whole image
    grows: bool = False  # to fill the largest canvas; otherwise no more than to a tile's side

    @property
    def max_tiles(self) -> int:
        """The most tiles of an image, the whole one included."""
        return self.max_cut + 1 if self.max_cut > 1 else 1


class SplitScaling(msgspec.Struct, frozen=True, tag="split"):
    """Sides are rounded to whole cells and scaled to an area within bounds, as by ``AreaScaling``.
    A much larger image is also scaled to the grid of tiles whose shape is closest to its own, and
    cut into these, which precede it (LFM2-VL, Liquid AI 2025).
    """

    side: int  # of a tile, in pixels
    min_cut: int  # tiles, without the whole image
    max_cut: int  # 1: images are not cut
    min_pixels: int  # of the whole image
    max_pixels: int
    tolerance: float = 2.0  # images of up to so many times ``max_pixels`` are not cut

    @property
    def max_tiles(self) -> int:
        """The most tiles of an image, without the whole one."""
        return self.max_cut if self.max_cut > 1 else 0


class SliceScaling(msgspec.Struct, frozen=True, tag="slices"):
    """The image, keeping its shape, is scaled to about the area of a square, if it is larger or not
    cut, and its sides are rounded to whole cells. A larger image is also cut into slices of this
    area, in the grid whose shape is closest to its own; they follow it (MiniCPM-V, Yao et al.
    2024).
    """

    side: int  # of the square, in pixels
    max_cut: int  # slices; 1: images are not cut

    @property
    def max_tiles(self) -> int:
        """The most parts of an image, the whole one included."""
        return self.max_cut + 1 if self.max_cut > 1 else 1

    def max_cells(self, cell: int) -> int:
        """Return the most cells of a part; ``cell`` is a cell's side in pixels."""
        return 2 * (self.side // cell) ** 2


class AnyresScaling(msgspec.Struct, frozen=True, tag="anyres"):
    """Of the canvases of whole tiles, that is chosen on which most of the image's pixels can be
    seen; the image is scaled to it, keeping its shape, and lies in its middle. A view of the whole
    image, both sides scaled to one tile, precedes it (LLaVA-NeXT, Liu et al. 2024).
    """

    side: int  # of a tile, in pixels
    grids: tuple[tuple[int, int], ...]  # rows and columns of each canvas; none: only the view
    # Tiles whose cells are as many as a canvas is shown with; of larger ones, the embeddings of
    # cells are interpolated (LLaVA-OneVision). None: all cells are shown.
    max_area: int | None = None
    # The colour that completes an image to a square where there is only a view. With it, there is
    # only a view if a prompt has several images (LLaVA-OneVision). None: both sides are scaled.
    border: tuple[int, int, int] | None = None

    def max_cells(self, grid: tuple[int, int], cell: int) -> int:
        """Return the most tokens of an image on this canvas; ``cell`` is a cell's side in
        pixels."""
        across = self.side // cell
        rows, columns = grid[0] * across, grid[1] * across
        most = rows * columns
        if self.max_area is not None:  # exceeded by up to a tenth along each side
            most = min(most, int(1.21 * self.max_area * across**2) + 1)
        return across**2 + most + rows

    @property
    def only_view(self) -> AnyresScaling:
        """The same without canvases."""
        return msgspec.structs.replace(self, grids=())


Scaling = (
    AreaScaling
    | EdgeScaling
    | PaddedScaling
    | FixedScaling
    | BudgetScaling
    | TileScaling
    | GridScaling
    | CornerScaling
    | SplitScaling
    | SliceScaling
    | AnyresScaling
)
Resampling = Literal["bicubic", "bilinear", "lanczos"]


class PlaceholderRewrite(msgspec.Struct, frozen=True, tag="text"):
    """Replaces what a chat template writes for an image by what the model reads.

    It is applied before tokenisation, because it may change the tokens of the surrounding text.
    """

    template_text: str
    model_text: str  # contains ``ImageRules.token_id`` once, as text

    def apply(self, text: str) -> str:
        """Rewrite a template's output."""
        return text.replace(self.template_text, self.model_text)


class TileRewrite(msgspec.Struct, frozen=True, tag="tiles"):
    """Replaces what a chat template writes for an image by the text of its tiles.

    ``tile``, ``whole`` and ``alone`` contain ``ImageRules.token_id`` once, as text. In ``tile``,
    ``{row}`` and ``{column}`` stand for its place and ``{number}`` for its place among all tiles,
    counted from 1.
    """

    template_text: str
    tile: str
    whole: str  # the whole image of which there are tiles
    alone: str  # an image that is not cut
    between: str = ""  # tiles of a row
    row_end: str = ""  # after a row of tiles; with ``whole_first``, between two
    begin: str = ""  # ``{index}`` stands for the image's place in the prompt, counted from 0
    end: str = ""
    whole_first: bool = False  # the whole image before its tiles

    def apply(self, text: str, grids: Sequence[tuple[int, int]]) -> str:
        """Rewrite a template's output.

        Args:
            text: with the placeholder of each image.
            grids: rows and columns of each image's tiles; zeros: it is not cut.
        """
        before, *after = text.split(self.template_text)
        shown = (
            self.begin.replace("{index}", str(index)) + self._tiles(*grid) + self.end
            for index, grid in enumerate(grids)
        )
        return before + "".join(image + rest for image, rest in zip(shown, after, strict=True))

    def _tiles(self, rows: int, columns: int) -> str:
        if rows == 0:
            return self.alone
        places = [[(row, column) for column in range(columns)] for row in range(rows)]
        named = ([self._tile(*at, columns) for at in row] for row in places)
        if self.whole_first:
            return self.whole + self.row_end.join(map(self.between.join, named))
        shown = (self.between.join(row) + self.row_end for row in named)
        return "".join(shown) + self.whole

    def _tile(self, row: int, column: int, columns: int) -> str:
        text = self.tile.replace("{number}", str(row * columns + column + 1))
        return text.replace("{row}", str(row + 1)).replace("{column}", str(column + 1))


class ImageRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a model takes images: their sizes, and the tokens that represent them.

    A chat template writes ``token_id`` once for each image, possibly through ``rewriting``. The
    model's prompt has one for each cell, row by row. If they are set, ``row_end_id`` ends each row
    except the last, and ``end_id`` the last one. An image that is cut has these for each tile.
    """

    token_id: int
    cell: int  # pixels, the side of the square that becomes one token
    scaling: Scaling
    resampling: Resampling = "bicubic"
    rewriting: PlaceholderRewrite | TileRewrite | None = None
    row_end_id: int | None = None
    end_id: int | None = None
    max_images: int  # per prompt
    # Image tokens attend to each other in both directions: an image is computed within one step.
    is_bidirectional: bool = False

    def among(self, num_images: int) -> ImageRules:
        """Return the rules for the images of a prompt that has so many."""
        scaling = self.scaling
        if not isinstance(scaling, AnyresScaling) or scaling.border is None or num_images < 2:
            return self
        return msgspec.structs.replace(self, scaling=scaling.only_view)


class Region(msgspec.Struct, frozen=True):
    """The cells of an image that a model is shown, in ``AnyresScaling``.

    They are interpolated if fewer are shown. A learned embedding ends each row, or only the last.
    """

    top: int  # cells
    left: int
    rows: int
    columns: int
    shown_rows: int
    shown_columns: int
    ends_rows: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens in a prompt, ends included."""
        ends = self.shown_rows if self.ends_rows else 1
        return self.shown_rows * self.shown_columns + ends


class VideoPlace(msgspec.Struct, frozen=True):
    """Where a part of a video stands in it."""

    index: int  # 0: it is the first
    # Rotary time since the first part; None: the part's positions are those of an image.
    time: int | None = None


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """An image, a tile or a part of a video in a prompt, in the model's size. Crosses the process
    boundary.

    Each tile and each part is embedded by itself, so to the engine it is an image like any other.
    """

    start: int  # index of its first token in the prompt
    num_tokens: int  # from there on, row ends included
    height: int  # pixels, whole cells
    width: int
    pixels: bytes  # num_frames * height * width * 3, RGB
    digest: bytes  # of the size, the pixels, the region and the place in a video
    is_tile: bool = False  # cut from the next image of the prompt that is no tile
    num_frames: int = 1
    video: VideoPlace | None = None  # None: it is no part of a video
    region: Region | None = None  # None: all of its cells

    @property
    def begins_video(self) -> bool:
        """Whether it is the first part of a video."""
        return self.video is not None and self.video.index == 0

    def span(self, cell: int) -> tuple[int, int]:
        """Return the range of prompt places from its first cell to one past its last; ``cell``
        is a cell's side in pixels."""
        if self.region is not None:
            return self.start, self.start + self.num_tokens
        rows, columns = self.height // cell, self.width // cell
        return self.start, self.start + (rows - 1) * (self.num_tokens // rows) + columns

    def __repr__(self) -> str:  # without the pixels, as requests may be logged
        shape = f"{self.width} x {self.height}"
        return f"Image({shape} pixels, {self.num_tokens} tokens from {self.start})"

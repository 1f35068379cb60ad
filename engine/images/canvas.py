"""Images on canvases of whole tiles, as LLaVA-NeXT and LLaVA-OneVision are shown them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import InvalidParameter
from engine.images.types import AnyresScaling, Region

if TYPE_CHECKING:
    from PIL.Image import Image, Resampling

# Pixels along a side of a square that completes an image; a longer image is scaled down before.
_MAX_SQUARE = 5792
# A canvas whose cells are more by this factor along each side is shrunk.
_TOLERANCE = 1.1


class Layout(NamedTuple):
    """An image as it is shown."""

    view: Image | None  # the whole of it in one tile; None: ``canvas`` is all there is
    canvas: Image  # whole cells of tiles, side by side
    region: Region  # of the canvas


def lay_out(image: Image, scaling: AnyresScaling, resampling: Resampling, cell: int) -> Layout:
    """Scale an RGB image to a view and a canvas.

    Raises:
        InvalidParameter: it is too narrow.
    """
    side, across = scaling.side, scaling.side // cell
    kept = across * cell  # pixels of a tile that are in whole cells
    if not scaling.grids:
        if scaling.border is not None:
            image = _squared(image, scaling.border, resampling)
        view = image.resize((side, side), resampling).crop((0, 0, kept, kept))
        return Layout(None, view, Region(0, 0, *(across,) * 4, ends_rows=False))
    rows, columns = choose_grid(image.height, image.width, scaling)
    region = visible_region(image.height, image.width, (rows, columns), scaling, cell)
    canvas = _in_the_middle(image, rows * side, columns * side, resampling)
    view = image.resize((side, side), resampling).crop((0, 0, kept, kept))
    return Layout(view, _without_rests(canvas, side, kept), region)


def choose_grid(height: int, width: int, scaling: AnyresScaling) -> tuple[int, int]:
    """Return the rows and columns of the canvas on which most of the image's pixels can be seen;
    of several, of the smallest.

    This is ``select_best_resolution`` of LLaVA-NeXT.
    """
    most, least = 0, math.inf
    best = scaling.grids[0]
    for rows, columns in scaling.grids:
        tall, wide = rows * scaling.side, columns * scaling.side
        scale = min(wide / width, tall / height)
        seen = min(int(width * scale) * int(height * scale), width * height)
        wasted = tall * wide - seen
        if seen > most or (seen == most and wasted < least):
            most, least, best = seen, wasted, (rows, columns)
    return best


def visible_region(
    height: int, width: int, grid: tuple[int, int], scaling: AnyresScaling, cell: int
) -> Region:
    """Return the cells of a canvas that the image covers, borders of equal width left out.

    This is ``unpad_image`` of LLaVA-NeXT, and the limit of LLaVA-OneVision.
    """
    across = scaling.side // cell
    rows, columns = grid[0] * across, grid[1] * across
    top = left = 0
    if width / height > columns / rows:
        top = (rows - int(round(height * (columns / width), 7))) // 2
        rows -= 2 * top
    else:
        left = (columns - int(round(width * (rows / height), 7))) // 2
        columns -= 2 * left
    if not rows * columns:
        raise _too_narrow(height, width)
    shown = rows, columns
    if scaling.max_area is not None:
        ratio = math.sqrt(rows * columns / (scaling.max_area * across**2))
        if ratio > _TOLERANCE:
            shown = max(1, int(rows // ratio)), max(1, int(columns // ratio))
    return Region(top, left, rows, columns, *shown)


def _in_the_middle(image: Image, height: int, width: int, resampling: Resampling) -> Image:
    """Scale the image to the largest size that fits, and put it into the middle of a black one."""
    from PIL.Image import new

    wide, tall = width / image.width, height / image.height
    if wide < tall:
        size = width, min(math.ceil(image.height * wide), height)
    else:
        size = min(math.ceil(image.width * tall), width), height
    scaled = image.resize(size, resampling)
    if size == (width, height):
        return scaled
    canvas = new("RGB", (width, height))
    canvas.paste(scaled, ((width - size[0]) // 2, (height - size[1]) // 2))
    return canvas


def _without_rests(canvas: Image, side: int, kept: int) -> Image:
    """Leave out the pixels of each tile that are below or to the right of its whole cells."""
    from PIL.Image import new

    if kept == side:
        return canvas
    rows, columns = canvas.height // side, canvas.width // side
    found = new("RGB", (columns * kept, rows * kept))
    for row in range(rows):
        for column in range(columns):
            left, top = column * side, row * side
            tile = canvas.crop((left, top, left + kept, top + kept))
            found.paste(tile, (column * kept, row * kept))
    return found


def _squared(image: Image, border: tuple[int, int, int], resampling: Resampling) -> Image:
    """Put the image into the middle of a square of this colour."""
    from PIL.Image import new

    side = max(image.size)
    if side > _MAX_SQUARE:
        scale = _MAX_SQUARE / side
        size = tuple(max(1, int(length * scale)) for length in image.size)
        image, side = image.resize((size[0], size[1]), resampling), max(size)
    if image.width == image.height:
        return image
    square = new("RGB", (side, side), border)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _too_narrow(height: int, width: int) -> InvalidParameter:
    return InvalidParameter(f"an image of {width} x {height} pixels is too narrow for this model")

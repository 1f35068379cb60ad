"""Cut images into tiles of one size, as Hugging Face's image processors do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import InvalidParameter
from engine.images.types import (
    MAX_TILED_SIDE,
    CornerScaling,
    GridScaling,
    SplitScaling,
    TileScaling,
)

if TYPE_CHECKING:
    from PIL.Image import Image, Resampling


class Tiles(NamedTuple):
    """An image in tiles of the same size."""

    tiles: list[Image]  # row by row
    columns: int
    whole: Image  # the same picture, in the size of one tile except by ``SplitScaling``


def cut_into_tiles(
    image: Image,
    scaling: TileScaling | GridScaling | CornerScaling | SplitScaling,
    resampling: Resampling,
    cell: int,
) -> Tiles:
    """Scale an RGB image and cut it into tiles; there are none if one tile shows all of it."""
    side = scaling.side
    if isinstance(scaling, SplitScaling):
        height, width = whole_size(image.height, image.width, scaling, cell)
        whole = image.resize((width, height), resampling)
        rounded = math.prod(round(length / cell) * cell for length in image.size)
        if scaling.max_cut == 1 or rounded <= scaling.max_pixels * scaling.tolerance:
            return Tiles([], 0, whole)
        rows, columns = closest_grid(image.height, image.width, scaling)
        return Tiles(
            _cut(image.resize((columns * side, rows * side), resampling), side), columns, whole
        )
    if isinstance(scaling, CornerScaling):
        rows, columns = best_canvas(image.height, image.width, scaling)
        canvas = _in_the_corner(image, rows * side, columns * side, scaling, resampling)
        if rows * columns == 1:
            return Tiles([], 0, canvas)
        return Tiles(_cut(canvas, side), columns, image.resize((side, side), resampling))
    if isinstance(scaling, GridScaling):
        choose = fitting_grid if scaling.fits else closest_grid
        rows, columns = choose(image.height, image.width, scaling)
        whole = image.resize((side, side), resampling)
        if rows * columns == 1:
            return Tiles([], 0, whole)
        return Tiles(
            _cut(image.resize((columns * side, rows * side), resampling), side), columns, whole
        )
    height, width = size_within_longest(image.height, image.width, scaling.longest)
    image = image.resize((width, height), resampling)
    rows, columns = grid_around(height, width, side) if scaling.cuts else (1, 1)
    # Each step rounds to bytes, so the steps are Hugging Face's.
    image = image.resize((columns * side, rows * side), resampling)
    if rows * columns == 1:
        return Tiles([], 0, image)
    return Tiles(_cut(image, side), columns, image.resize((side, side), resampling))


def whole_size(height: int, width: int, scaling: SplitScaling, cell: int) -> tuple[int, int]:
    """Return the height and width to which LFM2-VL scales a whole image.

    Raises:
        InvalidParameter: it is so narrow that it would have too many cells.
    """
    rows, columns = max(1, round(height / cell)), max(1, round(width / cell))
    area = rows * columns * cell**2
    if area > scaling.max_pixels:
        shrink = math.sqrt(height * width / scaling.max_pixels)
        rows = max(1, math.floor(height / shrink / cell))
        columns = max(1, math.floor(width / shrink / cell))
    elif area < scaling.min_pixels:
        grow = math.sqrt(scaling.min_pixels / (height * width))
        rows, columns = math.ceil(height * grow / cell), math.ceil(width * grow / cell)
    if rows * columns * cell**2 > scaling.max_pixels:
        problem = f"an image of {width} x {height} pixels is too narrow for this model"
        raise InvalidParameter(problem)
    return rows * cell, columns * cell


def size_within_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """Return the height and width to which Idefics3 scales an image before cutting it."""
    ratio = width / height
    if width >= height:
        height, width = _even(int(longest / ratio)), longest
    else:
        height, width = longest, _even(int(longest * ratio))
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > MAX_TILED_SIDE:
        height, width = int(MAX_TILED_SIDE / ratio), MAX_TILED_SIDE
    elif height > width and height > MAX_TILED_SIDE:
        height, width = MAX_TILED_SIDE, int(MAX_TILED_SIDE * ratio)
    return max(height, 1), max(width, 1)


def grid_around(height: int, width: int, side: int) -> tuple[int, int]:
    """Return the rows and columns of the tiles that Idefics3 stretches a scaled image to."""
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / side)
        return max(1, math.ceil(int(columns * side / ratio) / side)), columns
    rows = math.ceil(height / side)
    return rows, max(1, math.ceil(int(rows * side * ratio) / side))


def closest_grid(height: int, width: int, scaling: GridScaling | SplitScaling) -> tuple[int, int]:
    """Return the rows and columns of tiles whose aspect ratio is closest to an image's.

    Of equally close grids, the largest that the image fills by more than half is chosen.
    """
    ratio, least = width / height, math.inf
    best = 1, 1
    for rows, columns in _grids(scaling):
        distance = abs(ratio - columns / rows)
        fills = height * width > 0.5 * scaling.side**2 * rows * columns
        if distance < least or (distance == least and fills):
            least, best = distance, (rows, columns)
    return best


def fitting_grid(height: int, width: int, scaling: GridScaling) -> tuple[int, int]:
    """Return the rows and columns of the tiles in which an image is scaled least; see ``fits``."""
    grids = _grids(scaling)
    scales = [
        min(columns * scaling.side / width, rows * scaling.side / height) for rows, columns in grids
    ]
    least = min((scale for scale in scales if scale >= 1), default=max(scales))
    return grids[scales.index(least)]


def best_canvas(height: int, width: int, scaling: CornerScaling) -> tuple[int, int]:
    """Return the rows and columns of the canvas of an image in Llama 4.

    Scales are compared in single precision, as its processor does; of canvases on which the image
    has the same size, the smallest is chosen.
    """
    import numpy as np

    grids = np.array(_by_shape(scaling.max_cut), np.int64)
    sides = (grids * scaling.side).astype(np.float32)
    scales = np.minimum(sides[:, 0] / np.float32(height), sides[:, 1] / np.float32(width))
    growing = scales[scales >= 1]
    if growing.size:
        chosen = growing.max() if scaling.grows else growing.min()
    else:
        chosen = scales.max()
    same = grids[scales == chosen]
    rows, columns = same[same.prod(1).argmin()].tolist()
    return rows, columns


def _by_shape(most: int) -> list[tuple[int, int]]:
    """All grids of up to ``most`` tiles; those of the same shape, which are from large to small,
    follow the largest."""
    shapes: dict[float, list[tuple[int, int]]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                columns = count // rows
                shapes.setdefault(rows / columns, []).append((rows, columns))
    return [grid for grids in shapes.values() for grid in grids]


def _in_the_corner(
    image: Image, height: int, width: int, scaling: CornerScaling, resampling: Resampling
) -> Image:
    """Scale the image to fit, and put it into the upper left corner of a black one."""
    from PIL.Image import new

    tall, wide = height, width
    if not scaling.grows:  # not beyond a tile
        tall = min(max(image.height, scaling.side), height)
        wide = min(max(image.width, scaling.side), width)
    across, down = wide / image.width, tall / image.height
    if across < down:
        size = wide, min(math.floor(image.height * across), tall)
    else:
        size = min(math.floor(image.width * down), wide), tall
    scaled = image.resize((max(size[0], 1), max(size[1], 1)), resampling)
    if scaled.size == (width, height):
        return scaled
    canvas = new("RGB", (width, height))
    canvas.paste(scaled)
    return canvas


def _grids(scaling: GridScaling | SplitScaling) -> list[tuple[int, int]]:
    """All grids with an allowed number of tiles, from few to many, those with few columns first."""
    sides = range(1, scaling.max_cut + 1)
    found = [(rows, columns) for columns in sides for rows in sides]
    allowed = range(scaling.min_cut, scaling.max_cut + 1)
    return sorted((grid for grid in found if math.prod(grid) in allowed), key=math.prod)


def _cut(image: Image, side: int) -> list[Image]:
    return [
        image.crop((left, top, left + side, top + side))
        for top in range(0, image.height, side)
        for left in range(0, image.width, side)
    ]


def _even(length: int) -> int:
    return length + length % 2

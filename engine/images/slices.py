"""Images in slices, as MiniCPM-V is shown them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import InvalidParameter
from engine.images.types import SliceScaling

if TYPE_CHECKING:
    from PIL.Image import Image, Resampling


class Slices(NamedTuple):
    """An image and its slices, all of whole cells."""

    whole: Image
    slices: list[Image]  # row by row
    columns: int  # of slices


def slice_image(image: Image, scaling: SliceScaling, resampling: Resampling, cell: int) -> Slices:
    """Scale an RGB image, and cut it if it is large.

    Raises:
        InvalidParameter: it is so narrow that a part would have more than twice the cells of a
            square.
    """
    height, width = image.height, image.width
    grid = sliced_grid(height, width, scaling)
    tall, wide = part_size(height, width, scaling, cell, grows=grid is None)
    whole = image.resize((wide, tall), resampling)
    if grid is None:
        return Slices(whole, [], 0)
    rows, columns = grid
    tall, wide = part_size(
        _rounded(height, rows) / rows, _rounded(width, columns) / columns, scaling, cell, grows=True
    )
    scaled = image.resize((columns * wide, rows * tall), resampling)
    slices = [
        scaled.crop((left, top, left + wide, top + tall))
        for top in range(0, scaled.height, tall)
        for left in range(0, scaled.width, wide)
    ]
    return Slices(whole, slices, columns)


def part_size(
    height: float, width: float, scaling: SliceScaling, cell: int, *, grows: bool
) -> tuple[int, int]:
    """Return the height and width of a part in whole cells: ``find_best_resize`` of MiniCPM-V.

    Raises:
        InvalidParameter: it would have more cells than any part may.
    """
    shape = f"{width:g} x {height:g}"
    if grows or height * width > scaling.side**2:
        ratio = width / height
        height = int(scaling.side / math.sqrt(ratio))
        width = int(height * ratio)
    tall, wide = _rounded(height, cell), _rounded(width, cell)
    if tall * wide > scaling.max_cells(cell) * cell**2:
        raise InvalidParameter(f"an image of {shape} pixels is too narrow for this model")
    return tall, wide


def sliced_grid(height: int, width: int, scaling: SliceScaling) -> tuple[int, int] | None:
    """Return the rows and columns of slices; None: the image is not cut.

    This is ``get_sliced_grid`` of MiniCPM-V.
    """
    ratio = math.log(width / height)
    wanted = min(math.ceil(width * height / scaling.side**2), scaling.max_cut)
    if wanted <= 1:
        return None
    best, least = (1, 1), math.inf
    for count in (wanted - 1, wanted, wanted + 1):
        if count == 1 or count > scaling.max_cut:
            continue
        for rows in (rows for rows in range(1, count + 1) if count % rows == 0):
            columns = count // rows
            error = abs(ratio - math.log(columns / rows))
            if error < least or (error == least and rows > best[0]):
                best, least = (rows, columns), error
    return best


def _rounded(length: float, step: int) -> int:
    return max(round(length / step) * step, step)

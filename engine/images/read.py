"""From the bytes of an image file to the pixels that a model sees.

This does what Hugging Face's image processors do before normalisation: orient the picture upright,
convert it to RGB over white, and scale it with Pillow to a size given by the model's rules. Pillow
is imported with the first image.
"""

from __future__ import annotations

import hashlib
import io
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.errors import InvalidParameter
from engine.images.canvas import lay_out
from engine.images.headers import has_many_scans, webp_size
from engine.images.slices import part_size, slice_image, sliced_grid
from engine.images.tiles import cut_into_tiles, whole_size
from engine.images.types import (
    AnyresScaling,
    AreaScaling,
    BudgetScaling,
    CornerScaling,
    EdgeScaling,
    FixedScaling,
    GridScaling,
    ImageRules,
    PaddedScaling,
    Region,
    SliceScaling,
    SplitScaling,
    TileScaling,
)

if TYPE_CHECKING:
    from PIL.Image import Image, Resampling

MAX_PIXELS = 2**25  # before scaling; admits 8K pictures; 100 MB in RGB
_MAX_ASPECT = 200  # Qwen2-VL's limit
_ORIENTATION = 0x0112  # the EXIF tag
_BAND_PIXELS = 2**19
_MAX_SCANS = 128  # of a JPEG; encoders write about 10


@dataclass(frozen=True)
class ProcessedImage:
    """An image as a model sees it."""

    height: int  # pixels, whole cells
    width: int
    pixels: bytes  # height * width * 3, RGB
    digest: bytes  # of the size, the pixels and the region
    tiles: tuple[ProcessedImage, ...] = ()  # cut from it, row by row
    columns: int = 0  # of tiles
    comes_first: bool = False  # it is shown before its tiles, otherwise behind them
    region: Region | None = None  # None: all of its cells are shown

    @property
    def parts(self) -> tuple[ProcessedImage, ...]:
        """All that the model is shown, in order: the tiles, and the whole image."""
        return (self, *self.tiles) if self.comes_first else (*self.tiles, self)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tiles; zeros if there are none."""
        return (len(self.tiles) // self.columns, self.columns) if self.tiles else (0, 0)

    @property
    def num_bytes(self) -> int:
        """The size of all pixels."""
        return sum(len(part.pixels) for part in self.parts)


def read_image(data: bytes, rules: ImageRules) -> ProcessedImage:
    """Decode a PNG, JPEG, WebP or GIF file; of an animation, its first frame.

    Raises:
        InvalidParameter: it is in another format, damaged, truncated, too large or too narrow.
    """
    return process_image(_open(data), rules)


def process_image(image: Image, rules: ImageRules) -> ProcessedImage:
    """Convert a Pillow image to what a model sees.

    Raises:
        InvalidParameter: it is damaged, truncated, too large or too narrow.
    """
    from PIL.Image import Resampling

    _check_pixels(*image.size)  # before the pixels are decoded
    try:
        image.load()
    except Exception:  # decoders raise anything on malformed files
        raise _damaged() from None
    image = _over_white(_in_bytes(_upright(image)))
    resampling = Resampling[rules.resampling.upper()]
    if isinstance(rules.scaling, AnyresScaling):
        view, canvas, region = lay_out(image, rules.scaling, resampling, rules.cell)
        whole = _processed(canvas, canvas.height, canvas.width, region)
        if view is None:
            return whole
        return replace(whole, tiles=(_processed(view, view.height, view.width),), columns=1)
    if isinstance(rules.scaling, SliceScaling):
        whole, slices, columns = slice_image(image, rules.scaling, resampling, rules.cell)
        cut = tuple(_processed(each, each.height, each.width) for each in slices)
        seen = _processed(whole, whole.height, whole.width)
        return replace(seen, tiles=cut, columns=columns, comes_first=True)
    height, width = scaled_size(image.height, image.width, rules)
    if isinstance(rules.scaling, (TileScaling, GridScaling, CornerScaling, SplitScaling)):
        tiles, columns, whole = cut_into_tiles(image, rules.scaling, resampling, rules.cell)
        side = rules.scaling.side // rules.cell * rules.cell
        cut = tuple(_processed(tile, side, side) for tile in tiles)
        return replace(_processed(whole, height, width), tiles=cut, columns=columns)
    if isinstance(rules.scaling, PaddedScaling):
        inner = padded_size(image.height, image.width, rules.scaling, rules.cell)
        image = _padded(image, inner, (height, width), resampling)
    elif isinstance(rules.scaling, FixedScaling):
        image = _square(image, rules.scaling, resampling)
    elif image.size != (width, height):
        image = image.resize((width, height), resampling)
    return _processed(image, height, width)


def scaled_size(height: int, width: int, rules: ImageRules) -> tuple[int, int]:
    """Return the height and width, in whole cells, to which a model scales an image or a tile;
    by ``SplitScaling``, the image.

    Raises:
        InvalidParameter: the image is too narrow.
    """
    scaling = rules.scaling
    square = FixedScaling, TileScaling, GridScaling, CornerScaling, AnyresScaling
    if isinstance(scaling, square):
        side = scaling.side // rules.cell * rules.cell
        return side, side
    if isinstance(scaling, SplitScaling):
        return whole_size(height, width, scaling, rules.cell)
    if isinstance(scaling, SliceScaling):
        grows = sliced_grid(height, width, scaling) is None
        return part_size(height, width, scaling, rules.cell, grows=grows)
    if isinstance(scaling, EdgeScaling):
        return _within_edge(height, width, scaling, rules.cell)
    if isinstance(scaling, PaddedScaling):
        height, width = padded_size(height, width, scaling, rules.cell)
        return _whole_cells(height, rules.cell), _whole_cells(width, rules.cell)
    if isinstance(scaling, BudgetScaling):
        return _within_budget(height, width, scaling, rules.cell)
    return within_area(height, width, scaling, rules.cell)


def _processed(
    image: Image, height: int, width: int, region: Region | None = None
) -> ProcessedImage:
    """Take the whole cells of a scaled image."""
    if image.size != (width, height):
        image = image.crop((0, 0, width, height))
    pixels = image.tobytes()
    size = height.to_bytes(4, "little") + width.to_bytes(4, "little")
    digest = hashlib.blake2b(size, digest_size=32)
    if region is not None:
        digest.update(repr(region).encode())
    digest.update(pixels)
    return ProcessedImage(height, width, pixels, digest.digest(), region=region)


def within_area(
    height: int, width: int, scaling: AreaScaling, cell: int, counted: int | None = None
) -> tuple[int, int]:
    """Compute ``smart_resize`` of Qwen2-VL.

    Args:
        height, width: of the image or the video.
        scaling: its limits.
        cell: pixels, the side of a cell.
        counted: frames by which the scaled area is multiplied before it is compared; None:
            ``scaling.num_frames``.

    Raises:
        InvalidParameter: the image is too narrow.
    """
    height, width = _grown(height, width, scaling, cell)
    if max(height, width) > _MAX_ASPECT * min(height, width):
        raise _too_narrow(height, width)
    rows, columns, frames = round(height / cell), round(width / cell), scaling.num_frames
    area = (counted or frames) * rows * columns * cell * cell
    if area > scaling.max_pixels:
        shrink = math.sqrt(frames * height * width / scaling.max_pixels)
        rows = max(1, math.floor(height / shrink / cell))
        columns = max(1, math.floor(width / shrink / cell))
    elif area < scaling.min_pixels:
        grow = math.sqrt(scaling.min_pixels / (frames * height * width))
        rows, columns = math.ceil(height * grow / cell), math.ceil(width * grow / cell)
    return rows * cell, columns * cell


def _grown(height: int, width: int, scaling: AreaScaling, cell: int) -> tuple[int, int]:
    """Scale an image thinner than a cell as ``growing`` says."""
    if scaling.growing == "cut" and min(height, width) < cell:
        factor = max(cell / height, cell / width)
        return int(height * factor), int(width * factor)
    if scaling.growing == "rounded":
        if height < cell:
            height, width = cell, round(width * cell / height)
        if width < cell:
            height, width = round(height * cell / width), cell
    return height, width


def _within_edge(height: int, width: int, scaling: EdgeScaling, cell: int) -> tuple[int, int]:
    """Compute ``get_resize_output_image_size`` of Pixtral."""
    ratio = max(height / scaling.longest, width / scaling.longest)
    sides = height, width
    if ratio > 1:
        sides = math.floor(height / ratio), math.floor(width / ratio)
    if min(sides) < 1:
        raise _too_narrow(height, width)
    return _whole_cells(sides[0], cell), _whole_cells(sides[1], cell)


def padded_size(height: int, width: int, scaling: PaddedScaling, cell: int) -> tuple[int, int]:
    """Return the height and width of an image before its cells are completed.

    This is ``navit_resize`` of Kimi K2.5; beyond ``max_cells`` it is repeated with fewer patches.
    """
    patch, longest = scaling.patch, scaling.max_side * scaling.patch
    count = max(1, height // patch) * max(1, width // patch)
    most = scaling.max_patches
    while True:
        scale = min(1.0, math.sqrt(most / count), longest / height, longest / width)
        sides = [min(max(1, int(side * scale)), longest) for side in (height, width)]
        num_cells = math.prod(-(-side // cell) for side in sides)
        if num_cells <= scaling.max_cells:
            return sides[0], sides[1]
        most = most * scaling.max_cells / num_cells


def _whole_cells(side: int, cell: int) -> int:
    return -(-side // cell) * cell


def _padded(
    image: Image, inner: tuple[int, int], outer: tuple[int, int], resampling: Resampling
) -> Image:
    """Scale the image to ``inner`` and put it into the upper left corner of a black one."""
    from PIL.Image import new

    (height, width), (whole_height, whole_width) = inner, outer
    scaled = image if image.size == (width, height) else image.resize((width, height), resampling)
    if inner == outer:
        return scaled
    whole = new("RGB", (whole_width, whole_height))
    whole.paste(scaled)
    return whole


def _square(image: Image, scaling: FixedScaling, resampling: Resampling) -> Image:
    """Scale the whole image to a square, or its shorter side and crop the centre."""
    side = scaling.side
    short, long = min(image.size), max(image.size)
    if not scaling.crop:
        return image.resize((side, side), resampling)
    if long > _MAX_ASPECT * short:
        raise _too_narrow(image.height, image.width)
    width, height = (side if length == short else side * long // short for length in image.size)
    scaled = image.resize((width, height), resampling)
    left, top = (width - side) // 2, (height - side) // 2
    return scaled.crop((left, top, left + side, top + side))


def _within_budget(height: int, width: int, scaling: BudgetScaling, cell: int) -> tuple[int, int]:
    """Compute ``get_aspect_ratio_preserving_size`` of Gemma 4."""
    most = scaling.max_cells
    scale = math.sqrt(most * cell**2 / (height * width))
    rows, columns = math.floor(scale * height / cell), math.floor(scale * width / cell)
    if rows == 0:
        rows, columns = 1, min(max(1, width // height), most)
    elif columns == 0:
        rows, columns = min(max(1, height // width), most), 1
    return rows * cell, columns * cell


def _open(data: bytes) -> Image:
    """Open the file, reading only its header, with the decoder that its first bytes indicate."""
    from PIL.GifImagePlugin import GifImageFile
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.PngImagePlugin import PngImageFile
    from PIL.WebPImagePlugin import WebPImageFile

    if not data:
        raise InvalidParameter("the image is empty")
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        decoder = PngImageFile
    elif data.startswith(b"\xff\xd8\xff"):
        if has_many_scans(data, _MAX_SCANS):
            raise InvalidParameter(f"the image has more than {_MAX_SCANS} scans")
        decoder = JpegImageFile
    elif data.startswith((b"GIF87a", b"GIF89a")):
        decoder = GifImageFile
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        _check_pixels(*webp_size(data))  # this decoder allocates the pixels on opening
        decoder = WebPImageFile
    else:
        raise InvalidParameter("the image is neither PNG, JPEG, WebP nor GIF")
    try:
        return decoder(io.BytesIO(data))
    except Exception:
        raise _damaged() from None


def _upright(image: Image) -> Image:
    from PIL import ImageOps

    try:
        is_turned = image.getexif().get(_ORIENTATION, 1) != 1
        return ImageOps.exif_transpose(image) if is_turned else image
    except Exception:  # unreadable EXIF: assume no rotation
        return image


def _in_bytes(image: Image) -> Image:
    """Convert greyscale of 16 bits to 8; Pillow would make all but the darkest of it white."""
    if not image.mode.startswith("I;16"):
        return image
    import numpy as np
    from PIL.Image import fromarray

    return fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _over_white(image: Image) -> Image:
    """Convert to RGB, blending transparency with white.

    This is done in bands, because Pillow blocks all other threads during an operation.
    """
    from PIL.Image import alpha_composite, new

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    flat = new("RGB", image.size)
    num_rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, num_rows):
        box = (0, top, image.width, min(top + num_rows, image.height))
        band = image.crop(box).convert("RGBA")
        white = new("RGBA", band.size, (255, 255, 255, 255))
        flat.paste(alpha_composite(white, band).convert("RGB"), box)
    return flat


def _check_pixels(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        most = f"{MAX_PIXELS:,} pixels"
        raise InvalidParameter(f"an image of {width} x {height} pixels is larger than {most}")
    if not width * height:
        raise _damaged()


def _damaged() -> InvalidParameter:
    return InvalidParameter("the image is damaged or cut off")


def _too_narrow(height: int, width: int) -> InvalidParameter:
    return InvalidParameter(f"an image of {width} x {height} pixels is too narrow for this model")

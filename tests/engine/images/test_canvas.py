"""Images on canvases have the pixels and tokens of LLaVA-NeXT's and OneVision's processors."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.errors import InvalidParameter
from engine.images.canvas import choose_grid, visible_region
from engine.images.placeholders import expand_image_tokens
from engine.images.read import ProcessedImage, process_image
from engine.images.types import AnyresScaling, ImageRules

PLAIN: dict[str, Any] = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
NEXT = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
ONEVISION = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7))
# Heights and widths: with borders above and below, beside, without, elongated, and tiny.
SHAPES = [(50, 170), (90, 41), (96, 96), (30, 500), (400, 37), (40, 80), (7, 5)]
SIDES = st.integers(1, 4000)


def rules(scaling: AnyresScaling) -> ImageRules:
    return ImageRules(token_id=9, cell=8, scaling=scaling, max_images=4)


def picture(height: int, width: int) -> Image.Image:
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def pinpoints(scaling: AnyresScaling) -> list[list[int]]:
    return [[rows * scaling.side, columns * scaling.side] for rows, columns in scaling.grids]


def parts_of(seen: ProcessedImage, side: int) -> list[np.ndarray]:
    """The view and the tiles of the canvas, each of whole cells: [height, width, 3]."""
    kept, found = side // 8 * 8, []
    for part in seen.parts:
        pixels = np.frombuffer(part.pixels, np.uint8).reshape(part.height, part.width, 3)
        rows, columns = part.height // kept, part.width // kept
        found += list(
            pixels.reshape(rows, kept, columns, kept, 3).swapaxes(1, 2).reshape(-1, kept, kept, 3)
        )
    return found


@pytest.mark.parametrize("side", [40, 44])
def test_pixels_are_llava_nexts(side: int) -> None:
    """Of 44 pixels a side, four are in no cell."""
    from transformers import LlavaNextImageProcessorPil

    scaling = AnyresScaling(side, NEXT)
    processor = LlavaNextImageProcessorPil(
        size={"shortest_edge": side},
        crop_size={"height": side, "width": side},
        image_grid_pinpoints=pinpoints(scaling),
    )
    for shape in SHAPES:
        seen = process_image(picture(*shape), rules(scaling))
        wanted = processor(picture(*shape), **PLAIN)["pixel_values"][0].transpose(0, 2, 3, 1)
        kept = side // 8 * 8
        np.testing.assert_array_equal(parts_of(seen, side), wanted[:, :kept, :kept])


def test_pixels_are_llava_onevisions() -> None:
    """Those of an image that is alone, and of several."""
    from transformers import LlavaOnevisionImageProcessorPil

    scaling = AnyresScaling(44, ONEVISION, max_area=9, border=(122, 116, 104))
    processor = LlavaOnevisionImageProcessorPil(
        size={"height": 44, "width": 44}, image_grid_pinpoints=pinpoints(scaling)
    )
    for shape in SHAPES:
        shown = picture(*shape)
        for images, own in ((shown, rules(scaling)), ([[shown, shown]], rules(scaling).among(2))):
            wanted = processor(images, **PLAIN)["pixel_values"][0].transpose(0, 2, 3, 1)
            np.testing.assert_array_equal(
                parts_of(process_image(shown, own), 44), wanted[:, :40, :40]
            )


@settings(deadline=None)
@given(SIDES, SIDES, st.sampled_from([NEXT, ONEVISION]))
@example(2, 4000, NEXT)
def test_canvases_are_hugging_faces(
    height: int, width: int, grids: tuple[tuple[int, int], ...]
) -> None:
    from transformers.image_processing_utils import select_best_resolution

    scaling = AnyresScaling(336, grids)
    wanted = select_best_resolution((height, width), pinpoints(scaling))
    rows, columns = choose_grid(height, width, scaling)
    assert (rows * 336, columns * 336) == wanted


@settings(deadline=None)
@given(SIDES, SIDES, st.sampled_from([(NEXT, None), (ONEVISION, 9), (ONEVISION, 2)]))
def test_tokens_are_hugging_faces(
    height: int, width: int, kind: tuple[tuple[tuple[int, int], ...], int | None]
) -> None:
    """As its models cut them out of what the encoder makes."""
    import torch
    from transformers.models.llava_next.modeling_llava_next import unpad_image

    grids, most = kind
    scaling = AnyresScaling(378, grids, most)
    grid = choose_grid(height, width, scaling)
    try:
        region = visible_region(height, width, grid, scaling, 14)
    except InvalidParameter:
        return
    cells = torch.arange(grid[0] * grid[1] * 27**2).view(1, grid[0] * 27, grid[1] * 27)
    wanted = unpad_image(cells, (height, width))[0]
    rows, columns = region.top + region.rows, region.left + region.columns
    assert torch.equal(cells[0, region.top : rows, region.left : columns], wanted)
    ratio = 0.0 if most is None else (wanted.numel() / (most * 27**2)) ** 0.5
    shown = wanted.shape
    if ratio > 1.1:
        shown = tuple(int(side // ratio) for side in wanted.shape)
    assert (region.shown_rows, region.shown_columns) == shown
    assert 27**2 + region.num_tokens <= scaling.max_cells(grid, 14)


def test_an_image_too_narrow_for_any_cell_is_refused() -> None:
    for shape in ((1, 4000), (4000, 1), (2, 3000)):
        with pytest.raises(InvalidParameter, match="too narrow"):
            process_image(picture(*shape), rules(AnyresScaling(32, NEXT)))


def test_a_long_image_among_others_is_scaled_down_before_it_is_squared() -> None:
    seen = process_image(
        picture(2, 9000), rules(AnyresScaling(40, NEXT, border=(1, 2, 3))).among(2)
    )
    pixels = np.frombuffer(seen.pixels, np.uint8).reshape(40, 40, 3)
    assert pixels[0, 0].tolist() == [1, 2, 3]
    assert seen.region is not None
    assert seen.region.num_tokens == 26


def test_a_view_and_a_canvas_have_tokens_of_their_own() -> None:
    scaling = AnyresScaling(16, ((1, 2),))
    seen = process_image(picture(16, 32), rules(scaling))
    ids, images = expand_image_tokens([1, 9, 9, 2], [seen], rules(scaling))
    assert ids == [1, *[9] * (4 + 2 * 5), 2]
    assert [(image.start, image.num_tokens) for image in images] == [(1, 4), (5, 10)]
    assert [image.is_tile for image in images] == [True, False]
    assert images[1].span(8) == (5, 15)
    packed = msgspec.msgpack.encode(images)
    assert msgspec.msgpack.decode(packed, type=tuple[type(images[0]), ...]) == images


def test_a_view_and_a_canvas_of_the_same_pixels_are_told_apart() -> None:
    """Their embeddings are kept by digest, and only the canvas has ends of rows."""
    seen = process_image(picture(16, 16), rules(AnyresScaling(16, ((1, 1),))))
    view, canvas = seen.parts
    assert view.pixels == canvas.pixels
    assert view.digest != canvas.digest


def test_only_models_that_say_so_see_several_images_otherwise() -> None:
    alike, other = (rules(AnyresScaling(16, NEXT, border=border)) for border in (None, (0, 0, 0)))
    assert alike.among(3) is alike
    assert other.among(1) is other
    assert other.among(2).scaling == AnyresScaling(16, (), border=(0, 0, 0))

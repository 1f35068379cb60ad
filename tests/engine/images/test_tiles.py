"""Images are cut into the tiles of Hugging Face's image processors, and named as its prompts do."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.errors import InvalidParameter
from engine.images.placeholders import expand_image_tokens, make_rewriter
from engine.images.read import ProcessedImage, process_image
from engine.images.tiles import closest_grid, grid_around, size_within_longest
from engine.images.types import GridScaling, ImageRules, Resampling, TileRewrite, TileScaling

PLAIN: dict[str, Any] = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
# Smaller than a tile, exactly one, wide, tall, elongated, and as narrow as can be.
SHAPES = [(20, 9), (40, 40), (300, 170), (90, 240), (640, 35), (3, 500), (1, 1)]
SIDES = st.integers(1, 6000)
NAMED = TileRewrite(
    "<image>",
    tile="<around><row_{row}_col_{column}><image>",
    row_end="\n",
    whole="\n<global><image>",
    alone="<global><image>",
    end="<around>",
)


def rules(
    scaling: TileScaling | GridScaling, resampling: Resampling = "lanczos", **changes: Any
) -> ImageRules:
    return ImageRules(
        token_id=9, cell=4, scaling=scaling, resampling=resampling, max_images=4, **changes
    )


def picture(width: int, height: int) -> Image.Image:
    """Noise over a gradient."""
    rng = np.random.default_rng(width)
    ramp = np.add.outer(np.arange(height), np.arange(width))[..., None] % 200
    return Image.fromarray((ramp + rng.integers(0, 56, (height, width, 3))).astype(np.uint8))


def assert_parts_equal(seen: ProcessedImage, wanted: np.ndarray) -> None:
    """The tiles and the whole image have these pixels: [num_parts, 3, height, width]."""
    assert len(seen.parts) == len(wanted)
    for part, pixels in zip(seen.parts, wanted, strict=True):
        whole_cells = pixels[:, : part.height, : part.width].transpose(1, 2, 0)
        assert part.pixels == whole_cells.astype(np.uint8).tobytes()
        assert (part.height, part.width) == (pixels.shape[1] // 4 * 4, pixels.shape[2] // 4 * 4)
    assert seen.num_bytes == sum(len(part.pixels) for part in seen.parts)


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize(("side", "longest"), [(40, 160), (40, 40), (42, 100), (40, 150)])
def test_tiles_are_idefics3s(side: int, longest: int, cuts: bool) -> None:
    """Of 42 pixels a side, two are in no cell."""
    from transformers import Idefics3ImageProcessorPil

    size, tile = {"longest_edge": longest}, {"longest_edge": side}
    processor = Idefics3ImageProcessorPil(size=size, max_image_size=tile, do_image_splitting=cuts)
    options = {**PLAIN, "return_row_col_info": True}
    scaling = TileScaling(side, longest, cuts)
    for shape in SHAPES:
        seen = process_image(picture(*shape), rules(scaling))
        wanted = processor(picture(*shape), **options)
        assert_parts_equal(seen, wanted["pixel_values"][0])
        assert seen.grid == (wanted["rows"][0][0], wanted["cols"][0][0])
        assert len(seen.parts) <= scaling.max_tiles


@pytest.mark.parametrize(("least", "most"), [(1, 12), (1, 1), (1, 4), (3, 6)])
def test_tiles_are_internvls(least: int, most: int) -> None:
    from transformers import GotOcr2ImageProcessorPil

    square = {"height": 40, "width": 40}
    cut = {"min_patches": least, "max_patches": most, "crop_to_patches": True}
    processor = GotOcr2ImageProcessorPil(size=square, **cut)
    scaling = GridScaling(40, least, most)
    for shape in SHAPES:
        seen = process_image(picture(*shape), rules(scaling, "bicubic"))
        assert_parts_equal(seen, np.stack(processor(picture(*shape), **PLAIN)["pixel_values"]))
        assert len(seen.parts) <= scaling.max_tiles


@settings(deadline=None)
@given(SIDES, SIDES, st.sampled_from([364, 1456, 1536, 2048, 4095, 4096, 5000]))
def test_sizes_before_cutting_are_idefics3s(height: int, width: int, longest: int) -> None:
    from transformers.models.idefics3 import image_processing_pil_idefics3 as theirs

    blank = np.broadcast_to(np.uint8(0), (3, height, width))
    wanted = theirs.get_resize_output_image_size(blank, longest)
    assert size_within_longest(height, width, longest) == wanted


@settings(deadline=None)
@given(SIDES, SIDES, st.sampled_from([(364, 1456), (384, 1536), (512, 2048), (512, 512)]))
def test_no_image_has_more_tiles_than_is_told(
    height: int, width: int, limits: tuple[int, int]
) -> None:
    side, longest = limits
    scaled = size_within_longest(height, width, longest)
    rows, columns = grid_around(*scaled, side)
    most = TileScaling(side, longest).max_tiles
    assert (
        rows * columns + (rows * columns > 1) <= most == (longest // side) ** 2 + (longest > side)
    )


@settings(deadline=None)
@given(SIDES, SIDES, st.sampled_from([(1, 12), (1, 3), (2, 6)]))
def test_grids_are_internvls(height: int, width: int, limits: tuple[int, int]) -> None:
    from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as theirs

    wanted = theirs.get_optimal_tiled_canvas((height, width), (448, 448), *limits)
    assert closest_grid(height, width, GridScaling(448, *limits)) == wanted[::-1]


def cut(num_tiles: int, columns: int) -> ProcessedImage:
    parts = [ProcessedImage(8, 4, bytes(96), bytes([n]) * 32) for n in range(num_tiles)]
    return ProcessedImage(8, 4, bytes(96), b"w" * 32, tuple(parts), columns)


def test_tiles_are_named_by_row_and_column() -> None:
    rewrite = make_rewriter([cut(4, 2), cut(0, 0)], rules(TileScaling(8, 16), rewriting=NAMED))
    assert rewrite is not None
    assert rewrite("a<image>b <image>") == (
        "a<around><row_1_col_1><image><around><row_1_col_2><image>\n"
        "<around><row_2_col_1><image><around><row_2_col_2><image>\n"
        "\n<global><image><around>b <global><image><around>"
    )


def test_rules_cross_processes() -> None:
    for scaling in (TileScaling(8, 16, cuts=False), GridScaling(8, 2, 3)):
        told = rules(scaling, rewriting=NAMED)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=ImageRules) == told


@pytest.mark.parametrize("shown", [0, 1, 3])
def test_a_template_that_shows_another_number_is_refused(shown: int) -> None:
    rewrite = make_rewriter([cut(4, 2)] * 2, rules(TileScaling(8, 16), rewriting=NAMED))
    assert rewrite is not None
    with pytest.raises(InvalidParameter, match=f"shows {shown} images of 2"):
        rewrite("<image>" * shown)


def test_each_tile_has_its_tokens_and_one_image_is_counted() -> None:
    ids, images = expand_image_tokens([1, 9, 2, 9, 9, 3], [cut(2, 2)], rules(TileScaling(8, 16)))
    assert ids == [1, 9, 9, 2, 9, 9, 9, 9, 3]
    assert [(image.start, image.num_tokens) for image in images] == [(1, 2), (4, 2), (6, 2)]
    assert [image.digest[:1] for image in images] == [b"\0", b"\1", b"w"]
    assert [image.is_tile for image in images] == [True, True, False]

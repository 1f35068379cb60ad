"""A template's single image token becomes all tokens of the image, with its position recorded."""

from __future__ import annotations

import pytest

from engine.errors import InvalidParameter
from engine.images.placeholders import expand_image_tokens
from engine.images.read import ProcessedImage
from engine.images.types import AreaScaling, ImageRules, PlaceholderRewrite
from engine.requests import fan_out
from engine.types import SamplingParams

SCALING = AreaScaling(min_pixels=1, max_pixels=10**6)
PLAIN = ImageRules(token_id=9, cell=4, scaling=SCALING, max_images=4)
IN_ROWS = ImageRules(token_id=9, cell=4, scaling=SCALING, row_end_id=7, end_id=8, max_images=4)


def picture(rows: int, columns: int, value: int = 0) -> ProcessedImage:
    height, width = rows * 4, columns * 4
    return ProcessedImage(height, width, bytes([value]) * (height * width * 3), bytes([value]) * 32)


def test_each_cell_is_a_token() -> None:
    ids, images = expand_image_tokens([1, 9, 2, 9], [picture(2, 3), picture(1, 1, 5)], PLAIN)
    assert ids == [1, 9, 9, 9, 9, 9, 9, 2, 9]
    assert [(image.start, image.num_tokens) for image in images] == [(1, 6), (8, 1)]
    assert (images[0].height, images[0].width) == (8, 12)
    assert (images[1].pixels, images[1].digest) == (picture(1, 1, 5).pixels, b"\5" * 32)


def test_rows_end_where_the_model_wants_it() -> None:
    ids, images = expand_image_tokens([1, 9, 2], [picture(2, 3)], IN_ROWS)
    assert ids == [1, 9, 9, 9, 7, 9, 9, 9, 8, 2]
    assert (images[0].start, images[0].num_tokens) == (1, 8)


@pytest.mark.parametrize("shown", [0, 1, 3])
def test_a_template_that_shows_another_number_is_refused(shown: int) -> None:
    with pytest.raises(InvalidParameter, match=f"shows {shown} images of 2") as raised:
        expand_image_tokens([1, *[9] * shown], [picture(1, 1)] * 2, PLAIN)
    assert raised.value.param == "messages"


def test_every_choice_has_the_images() -> None:
    ids, images = expand_image_tokens([9], [picture(1, 2)], PLAIN)
    requests = fan_out("r", ids, SamplingParams(n=3), images=images)
    assert [request.images for request in requests] == [images] * 3


def test_what_a_template_writes_is_read_as_the_model_has_it() -> None:
    rewriting = PlaceholderRewrite("<begin>", "\n<begin><image><end>\n")
    written = "one <begin> two\n<begin><begin>"
    read = "one \n<begin><image><end>\n two\n\n<begin><image><end>\n\n<begin><image><end>\n"
    assert rewriting.apply(written) == read

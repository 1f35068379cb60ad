"""Prompts with images of random pixels, for tiny models (``tests/tiny_vision.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from engine.images.placeholders import expand_image_tokens
from engine.images.read import ProcessedImage, process_image
from engine.images.types import (
    AnyresScaling,
    CornerScaling,
    FixedScaling,
    GridScaling,
    ImageRules,
    SliceScaling,
    SplitScaling,
    TileScaling,
)
from engine.models.checkpoint import read_config
from engine.types import Request, SamplingParams
from tests.tiny_vision import VISION_START

# Rows and columns of images, in cells.
SHAPES = ((2, 3), (1, 1), (3, 2))
# Heights and widths in pixels of images that lie on canvases: with borders above, beside, and none.
CANVAS_SIZES = ((30, 56), (56, 30), (40, 40))
_TILED = CornerScaling, GridScaling, SliceScaling, SplitScaling, TileScaling


def rules_of(directory: Path) -> ImageRules:
    """The image rules of the model in a directory."""
    vision = read_config(str(directory)).vision
    assert vision is not None
    return vision.rules


def allowed(
    rules: ImageRules, shapes: Sequence[tuple[int, int]] = SHAPES
) -> Sequence[tuple[int, int]]:
    """The shapes that the model supports; repeated if all images or tiles have one shape."""
    scalings = FixedScaling, GridScaling, TileScaling, CornerScaling, AnyresScaling
    if not isinstance(rules.scaling, scalings):
        return shapes
    side = rules.scaling.side // rules.cell
    return ((side, side),) * len(shapes)


def ask(
    name: str,
    rules: ImageRules,
    seed: int = 0,
    sampling: SamplingParams | None = None,
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> Request:
    """A request with images of these shapes, where the model supports them, and text between them.

    The first one is cut into two tiles if the model has such. The pixels depend on the seed.
    """
    rng = np.random.default_rng(seed)
    pictures, template = [], [3, 7]
    for number, (rows, columns) in enumerate(allowed(rules, shapes)):
        if isinstance(rules.scaling, AnyresScaling):
            pixels = rng.integers(0, 256, (*CANVAS_SIZES[number], 3), np.uint8)
            pictures.append(process_image(Image.fromarray(pixels), rules))
            template += [VISION_START, *[rules.token_id] * 2, 11 + number]
            continue
        height, width = rows * rules.cell, columns * rules.cell
        num_tiles = 2 * (number == 0 and isinstance(rules.scaling, _TILED))
        *tiles, whole = (
            ProcessedImage(height, width, pixels.tobytes(), rng.bytes(16))
            for pixels in rng.integers(0, 256, (num_tiles + 1, height, width, 3), np.uint8)
        )
        pictures.append(replace(whole, tiles=tuple(tiles), columns=num_tiles))
        template += [VISION_START, *[rules.token_id] * (num_tiles + 1), 11 + number]
    ids, images = expand_image_tokens(template, pictures, rules)
    return Request(
        id=name,
        prompt_token_ids=tuple(ids),
        images=images,
        sampling=sampling or SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
    )

"""Expand a template's image token into the tokens of the image."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import InvalidParameter
from engine.images.read import ProcessedImage
from engine.images.types import Image, ImageRules


def expand_image_tokens(
    token_ids: Sequence[int], pictures: Sequence[ProcessedImage], rules: ImageRules
) -> tuple[list[int], tuple[Image, ...]]:
    """Return the prompt for the model, and the images in it.

    Args:
        token_ids: from a chat template, with one ``rules.token_id`` for each picture.
        pictures: in prompt order.
        rules: of the model.

    Raises:
        InvalidParameter: the template has a different number of images.
    """
    num_shown = sum(id_ == rules.token_id for id_ in token_ids)
    if num_shown != len(pictures):
        problem = f"the chat template shows {num_shown} images of {len(pictures)}"
        raise InvalidParameter(problem, param="messages")
    remaining = iter(pictures)
    placed: list[int] = []
    images: list[Image] = []
    for id_ in token_ids:
        if id_ != rules.token_id:
            placed.append(id_)
            continue
        picture = next(remaining)
        tokens = _tokens_of(picture, rules)
        images.append(
            Image(
                start=len(placed),
                num_tokens=len(tokens),
                height=picture.height,
                width=picture.width,
                pixels=picture.pixels,
                digest=picture.digest,
            )
        )
        placed += tokens
    return placed, tuple(images)


def _tokens_of(picture: ProcessedImage, rules: ImageRules) -> list[int]:
    rows, columns = picture.height // rules.cell, picture.width // rules.cell
    row = [rules.token_id] * columns
    if rules.row_end_id is not None:
        row.append(rules.row_end_id)
    tokens = row * rows
    if rules.end_id is not None:
        tokens[-1] = rules.end_id
    return tokens

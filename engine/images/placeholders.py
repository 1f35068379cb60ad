"""Expand a template's image token into the tokens of the image."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.errors import InvalidParameter
from engine.images.read import ProcessedImage
from engine.images.types import Image, ImageRules, TileRewrite


def make_rewriter(
    pictures: Sequence[ProcessedImage], rules: ImageRules
) -> Callable[[str], str] | None:
    """Return how a template's output is rewritten before it is tokenised; None: it is not.

    Args:
        pictures: in prompt order; at least one.
        rules: of the model.
    """
    rewriting = rules.rewriting
    if not isinstance(rewriting, TileRewrite):
        return None if rewriting is None else rewriting.apply

    def rewrite(text: str) -> str:
        _check_number(text.count(rewriting.template_text), len(pictures))
        return rewriting.apply(text, [picture.grid for picture in pictures])

    return rewrite


def expand_image_tokens(
    token_ids: Sequence[int], pictures: Sequence[ProcessedImage], rules: ImageRules
) -> tuple[list[int], tuple[Image, ...]]:
    """Return the prompt for the model, and the images in it.

    Args:
        token_ids: from a chat template, with one ``rules.token_id`` for each picture, or for each
            of its tiles and the whole one.
        pictures: in prompt order.
        rules: of the model.

    Raises:
        InvalidParameter: the template has a different number of images.
    """
    parts = [(part, part is not picture) for picture in pictures for part in picture.parts]
    _check_number(sum(id_ == rules.token_id for id_ in token_ids), len(parts))
    remaining = iter(parts)
    placed: list[int] = []
    images: list[Image] = []
    for id_ in token_ids:
        if id_ != rules.token_id:
            placed.append(id_)
            continue
        picture, is_tile = next(remaining)
        tokens = _tokens_of(picture, rules)
        images.append(
            Image(
                start=len(placed),
                num_tokens=len(tokens),
                height=picture.height,
                width=picture.width,
                pixels=picture.pixels,
                digest=picture.digest,
                is_tile=is_tile,
            )
        )
        placed += tokens
    return placed, tuple(images)


def _check_number(num_shown: int, num_wanted: int) -> None:
    if num_shown != num_wanted:
        problem = f"the chat template shows {num_shown} images of {num_wanted}"
        raise InvalidParameter(problem, param="messages")


def _tokens_of(picture: ProcessedImage, rules: ImageRules) -> list[int]:
    rows, columns = picture.height // rules.cell, picture.width // rules.cell
    row = [rules.token_id] * columns
    if rules.row_end_id is not None:
        row.append(rules.row_end_id)
    tokens = row * rows
    if rules.end_id is not None:
        tokens[-1] = rules.end_id
    return tokens

"""Expand a template's tokens for images and videos into those of their cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from engine.errors import InvalidParameter
from engine.images.read import ProcessedImage
from engine.images.types import Image, ImageRules, TileRewrite
from engine.video.types import ProcessedVideo, VideoRules


class SeenVideos(NamedTuple):
    """The videos of a prompt, in its order, and the model's rules for them."""

    videos: Sequence[ProcessedVideo]
    rules: VideoRules


def make_rewriter(
    pictures: Sequence[ProcessedImage], rules: ImageRules, seen: SeenVideos | None = None
) -> Callable[[str], str] | None:
    """Return how a template's output is rewritten before it is tokenised; None: it is not.

    Args:
        pictures: in prompt order.
        rules: of the model.
        seen: its videos; None: there are none.
    """
    texts = None if seen is None else seen.rules.text
    rewriting = rules.rewriting if pictures else None
    if rewriting is None and texts is None:
        return None

    def rewrite(text: str) -> str:
        if isinstance(rewriting, TileRewrite):
            _check_number(text.count(rewriting.template_text), len(pictures))
            text = rewriting.apply(text, [picture.grid for picture in pictures])
        elif rewriting is not None:
            text = rewriting.apply(text)
        if seen is None or texts is None:
            return text
        before, *after = text.split(texts.template_text)
        _check_number(len(after), len(seen.videos), "videos")
        shown = (video.text for video in seen.videos)
        return before + "".join(video + rest for video, rest in zip(shown, after, strict=True))

    return rewrite


def expand_image_tokens(
    token_ids: Sequence[int],
    pictures: Sequence[ProcessedImage],
    rules: ImageRules,
    seen: SeenVideos | None = None,
) -> tuple[list[int], tuple[Image, ...]]:
    """Return the prompt for the model, and the images and the parts of videos in it.

    Args:
        token_ids: from a chat template, with one ``rules.token_id`` for each picture, or for each
            of its tiles and the whole one; and one ``seen.rules.token_id`` for each video, or for
            each of its parts.
        pictures: in prompt order.
        rules: of the model.
        seen: its videos; None: there are none.

    Raises:
        InvalidParameter: the template has a different number of images or videos.
    """
    parts = [(part, part is not picture) for picture in pictures for part in picture.parts]
    _check_number(sum(id_ == rules.token_id for id_ in token_ids), len(parts))
    remaining = iter(parts)
    videos = iter(() if seen is None else _shown_videos(token_ids, seen))
    placed: list[int] = []
    images: list[Image] = []
    for id_ in token_ids:
        if seen is not None and id_ == seen.rules.token_id:
            for part in next(videos):
                images.append(replace(part, start=len(placed)))
                placed += [seen.rules.cell_token_id] * part.num_tokens
            continue
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
                region=picture.region,
            )
        )
        placed += tokens
    return placed, tuple(images)


def _shown_videos(token_ids: Sequence[int], seen: SeenVideos) -> Iterator[list[Image]]:
    """Return the parts for each of the template's tokens for videos, not yet at their places."""
    rules = seen.rules
    each = [_parts_of(video, rules) for video in seen.videos]
    if rules.text is not None:  # a token shows one part
        each = [[part] for parts in each for part in parts]
    _check_number(sum(id_ == rules.token_id for id_ in token_ids), len(each), "videos")
    return iter(each)


def _parts_of(video: ProcessedVideo, rules: VideoRules) -> list[Image]:
    num_cells = (video.height // rules.cell) * (video.width // rules.cell)
    return [
        Image(
            start=0,
            num_tokens=num_cells,
            height=video.height,
            width=video.width,
            pixels=part.pixels,
            digest=part.digest,
            num_frames=video.part_frames,
            video=part.place,
        )
        for part in video.parts
    ]


def _check_number(num_shown: int, num_wanted: int, kind: str = "images") -> None:
    if num_shown != num_wanted:
        problem = f"the chat template shows {num_shown} {kind} of {num_wanted}"
        raise InvalidParameter(problem, param="messages")


def _tokens_of(picture: ProcessedImage, rules: ImageRules) -> list[int]:
    if picture.region is not None:
        return [rules.token_id] * picture.region.num_tokens
    rows, columns = picture.height // rules.cell, picture.width // rules.cell
    row = [rules.token_id] * columns
    if rules.row_end_id is not None:
        row.append(rules.row_end_id)
    tokens = row * rows
    if rules.end_id is not None:
        tokens[-1] = rules.end_id
    return tokens

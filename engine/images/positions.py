"""Three-dimensional token positions of prompts with images and videos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.images.types import Image


class PromptPositions(NamedTuple):
    """Positions in three dimensions."""

    of_prompt: np.ndarray  # [3, num_tokens] int32: time, row, column
    delta: int  # added to the place of each token after the prompt; at most 0


def cells(image: Image, cell: int) -> np.ndarray:
    """Return the prompt places of an image's embeddings, row by row: [num_cells] int64.

    Args:
        image: with or without row end tokens, which have embeddings in a ``Region`` only.
        cell: the side of a cell, in pixels.
    """
    if image.region is not None:
        return np.arange(image.start, image.start + image.num_tokens)
    rows, columns = image.height // cell, image.width // cell
    places = np.arange(image.num_tokens).reshape(rows, -1)[:, :columns]
    return image.start + places.ravel()


def prompt_positions(num_tokens: int, images: Sequence[Image], cell: int) -> PromptPositions:
    """Compute M-RoPE positions (Wang et al. 2024, Qwen2-VL).

    All cells of an image have the time of its first cell, and rows and columns counted from there;
    the following text starts after the larger of the image's sides. The parts of a video that
    follow each other without text begin with the same row and column, each with a time of its own;
    the following text starts after the largest of all.

    Args:
        num_tokens: of the prompt.
        images: in it, in order, without row end tokens and regions.
        cell: the side of a cell, in pixels.
    """
    of_prompt = np.empty((3, num_tokens), np.int32)
    place = position = 0  # of the next token
    origin = 0  # of the newest image or video
    for image in images:
        _write_text(of_prompt, place, image.start, position)
        position += image.start - place
        time = 0 if image.video is None else image.video.time or 0
        if image.video is None or image.video.time is None or image.video.index == 0:
            origin = position
        rows, columns = image.height // cell, image.width // cell
        place = image.start + image.num_tokens
        here = of_prompt[:, image.start : place].reshape(3, rows, columns)
        here[0] = origin + time
        here[1] = origin + np.arange(rows)[:, None]
        here[2] = origin + np.arange(columns)
        position = max(position, origin + max(time + 1, rows, columns))
    _write_text(of_prompt, place, num_tokens, position)
    return PromptPositions(of_prompt, position - place)


def _write_text(of_prompt: np.ndarray, begin: int, end: int, position: int) -> None:
    of_prompt[:, begin:end] = np.arange(position, position + end - begin)

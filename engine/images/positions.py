"""Where the tokens of a prompt stand that holds images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.images.nouns import Image


class PromptPositions(NamedTuple):
    """Positions in three dimensions."""

    of_prompt: np.ndarray  # [3, num_tokens] int32: time, row, column
    ahead: int  # to be added to the place of each token behind the prompt; 0 or less


def cells(image: Image, cell: int) -> np.ndarray:
    """The places in the prompt of an image's cells, row by row: [num_cells] int64.

    Args:
        image: with or without tokens that end its rows.
        cell: pixels, its side.
    """
    rows, columns = image.height // cell, image.width // cell
    places = np.arange(image.num_tokens).reshape(rows, -1)[:, :columns]
    return image.start + places.ravel()


def prompt_positions(num_tokens: int, images: Sequence[Image], cell: int) -> PromptPositions:
    """M-RoPE (Wang et al. 2024, Qwen2-VL): an image's cells stand at the time of its first one, at
    rows and columns counted from there; text goes on behind the larger of its sides.

    Args:
        num_tokens: of the prompt.
        images: in it, in order, without tokens that end rows.
        cell: pixels, the side of what is one token.
    """
    of_prompt = np.empty((3, num_tokens), np.int32)
    place = position = 0  # of the next token
    for image in images:
        _write_text(of_prompt, place, image.start, position)
        position += image.start - place
        rows, columns = image.height // cell, image.width // cell
        place = image.start + image.num_tokens
        here = of_prompt[:, image.start : place].reshape(3, rows, columns)
        here[0] = position
        here[1] = position + np.arange(rows)[:, None]
        here[2] = position + np.arange(columns)
        position += max(rows, columns)
    _write_text(of_prompt, place, num_tokens, position)
    return PromptPositions(of_prompt, position - place)


def _write_text(of_prompt: np.ndarray, begin: int, end: int, position: int) -> None:
    of_prompt[:, begin:end] = np.arange(position, position + end - begin)

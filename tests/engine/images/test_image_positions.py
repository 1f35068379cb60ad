"""Positions of tokens in prompts with images and videos, as in Hugging Face's models."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.images.positions import cells, prompt_positions
from engine.images.types import Image, VideoPlace
from engine.runner.inputs import HostBatch
from engine.runner.mrope import MRopePositions
from engine.types import Request

CELL = 8
# Numbers of text tokens before each image and after the last, and the images' rows and columns.
SHAPES = st.integers(1, 4), st.integers(1, 4)
PROMPTS = st.lists(st.tuples(st.integers(0, 4), *SHAPES), max_size=4)
APART = st.lists(st.tuples(st.integers(1, 4), *SHAPES), max_size=4)


def placed(parts, row_end=False) -> list[Image]:
    images, place = [], 0
    for num_text, rows, columns in parts:
        place += num_text
        count = rows * (columns + row_end)
        size = {"height": rows * CELL, "width": columns * CELL}
        images.append(Image(start=place, num_tokens=count, **size, pixels=b"", digest=b""))
        place += count
    return images


def length(images, behind: int) -> int:
    return behind + (images[-1].start + images[-1].num_tokens if images else 0)


@pytest.fixture(scope="module")
def twin():
    """Hugging Face's model, for its computation of positions."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {"num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": 16, **sizes}
    vision = {"depth": 1, "num_heads": 2, "embed_dim": 16, "hidden_size": 16}
    config = transformers.Qwen2VLConfig(
        text_config={**text, "rope_parameters": rope}, vision_config=vision
    )
    return transformers.Qwen2VLModel(config)


@settings(deadline=None)
@given(APART, st.integers(1, 4))
def test_positions_are_those_of_hugging_face(twin, parts, behind):
    images = placed(parts)
    count = length(images, behind)
    kinds = torch.zeros(1, count, dtype=torch.int64)
    for image in images:
        kinds[0, image.start : image.start + image.num_tokens] = 1
    grids = torch.tensor([(1, 2 * rows, 2 * columns) for _, rows, columns in parts] or [(0, 0, 0)])
    expected, ahead = twin.get_rope_index(torch.ones_like(kinds), kinds, grids)
    found = prompt_positions(count, images, CELL)
    assert (found.of_prompt == expected[:, 0].numpy()).all()
    assert found.delta == int(ahead)


def filmed(num_text: int, times: list[int], rows: int, columns: int) -> list[Image]:
    """The parts of a video behind so many tokens."""
    count, size = rows * columns, {"height": rows * CELL, "width": columns * CELL}
    return [
        Image(
            **{"start": num_text + i * count, "num_tokens": count, **size},
            **{"pixels": b"", "digest": b"", "num_frames": 2, "video": VideoPlace(i, time)},
        )
        for i, time in enumerate(times)
    ]


@pytest.mark.parametrize(("count", "rows", "columns"), [(1, 2, 1), (3, 2, 3), (4, 4, 2)])
def test_positions_in_a_video_are_those_of_hugging_face(twin, count, rows, columns):
    """Of a video that is not longer than a side; behind others its newer code begins earlier."""
    parts = filmed(3, list(range(count)), rows, columns)
    length = parts[-1].start + parts[-1].num_tokens + 4
    kinds = torch.zeros(1, length, dtype=torch.int64)
    kinds[0, 3:-4] = 2
    grids = torch.tensor([(count, 2 * rows, 2 * columns)])
    expected, ahead = twin.get_rope_index(torch.ones_like(kinds), kinds, None, grids)
    found = prompt_positions(length, parts, CELL)
    assert (found.of_prompt == expected[:, 0].numpy()).all()
    assert found.delta == int(ahead)


def test_text_behind_a_video_begins_after_the_largest_of_its_positions():
    (first, second) = filmed(2, [0, 7], 1, 2)
    (image,) = placed([(7, 2, 1)])
    found = prompt_positions(11, [first, second, image], CELL)
    assert found.of_prompt.tolist() == [
        [0, 1, 2, 2, 9, 9, 10, 11, 11, 13, 14],
        [0, 1, 2, 2, 2, 2, 10, 11, 12, 13, 14],
        [0, 1, 2, 3, 2, 3, 10, 11, 11, 13, 14],
    ]


@given(PROMPTS, st.integers(0, 4), st.booleans())
def test_the_cells_of_an_image_lie_between_the_ends_of_its_rows(parts, behind, row_end):
    for image, (_, rows, columns) in zip(placed(parts, row_end), parts, strict=True):
        found = cells(image, CELL).reshape(rows, columns)
        assert (np.diff(found, axis=1) == 1).all()
        assert (np.diff(found[:, 0]) == columns + row_end).all()
        assert found[0, 0] == image.start
        assert image.span(CELL) == (image.start, found[-1, -1] + 1)


@given(PROMPTS, st.integers(1, 4), st.lists(st.integers(1, 7), min_size=1, max_size=9))
def test_the_chunks_of_a_row_stand_where_its_whole_text_does(parts, behind, counts):
    """However the row is split, and next to a row without images."""
    images = placed(parts)
    count = length(images, behind)
    request = Request(id="a", prompt_token_ids=(0,) * count, images=tuple(images))
    turns = MRopePositions(3, CELL)
    turns.add(1, request)
    of_prompt, ahead = prompt_positions(count, images, CELL)
    behind_it = np.arange(count, count + sum(counts)) + ahead
    expected = np.concatenate((of_prompt, np.tile(behind_it, (3, 1))), axis=1)
    for start, end in itertools.pairwise(itertools.accumulate(counts, initial=0)):
        found = turns.of(batch((0, 5, 2), (1, start, end - start)))
        assert (found[:, :2] == [5, 6]).all()
        assert (found[:, 2:] == expected[:, start:end]).all()


def test_a_row_that_has_left_turns_nothing():
    (image,) = placed([(1, 2, 3)])
    turns = MRopePositions(2, CELL)
    turns.add(0, Request(id="a", prompt_token_ids=(0,) * 9, images=(image,)))
    assert turns.deltas[0] == -3
    turns.clear(0)
    assert turns.of(batch((0, 0, 4))) is None
    assert turns.deltas[0] == 0


def batch(*rows) -> HostBatch:
    """Build a batch from slots, starts and counts."""
    slots, starts, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    bounds = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    tokens = np.zeros(bounds[-1], np.int32)
    return HostBatch(slots, bounds, starts, tokens, np.arange(len(rows), dtype=np.int32))

"""Vision encoders equal Hugging Face's, fed by its own image processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from engine.models.checkpoint import read_config, read_headers
from engine.models.vision.tower import ImageStates, VisionTower, load_tower
from tests import tiny_vision

CPU = torch.device("cpu")
# Rows and columns of cells.
SIZES = [(1, 1), (2, 3), (5, 2), (4, 4), (9, 6)]


def load(directory: Any, dtype: torch.dtype = torch.float32) -> VisionTower:
    config = read_config(str(directory))
    assert config.vision is not None, config.images_refused
    return load_tower(config.vision, read_headers(directory), dtype, CPU)


def picture(rows: int, columns: int, cell: int, seed: int = 0) -> np.ndarray:
    """[height, width, 3] uint8 noise of so many cells."""
    shape = (rows * cell, columns * cell, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def expected(model: Any, processor: Any, pixels: np.ndarray) -> ImageStates:
    """What Hugging Face makes of an image that has its size already."""
    read = processor(Image.fromarray(pixels), do_resize=False, return_tensors="pt")
    with torch.no_grad():
        out = model.get_image_features(**read, return_dict=True)
    deep = getattr(out, "deepstack_features", None) or ()
    return ImageStates(torch.cat(tuple(out.pooler_output)), tuple(deep))


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """To a few of float32's last bits of the largest number."""
    tolerance = 2e-6 * float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_embeddings_equal_hugging_faces(tmp_path, kind):
    model = tiny_vision.save(kind, tmp_path)
    processor = tiny_vision.processor(kind)
    tower = load(tmp_path)
    for rows, columns in SIZES:
        pixels = picture(rows, columns, tower.spec.cell_size)
        wanted = expected(model, processor, pixels)
        found = tower.embed(torch.from_numpy(pixels))
        assert found.embeddings.shape == (rows * columns, 48)
        assert_close(found.embeddings, wanted.embeddings)
        for own, other in zip(found.deep, wanted.deep, strict=True):
            assert_close(own, other)

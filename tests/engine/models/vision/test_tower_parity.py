"""Vision encoders equal Hugging Face's on the output of its own image processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.models.checkpoint import read_config, read_headers
from engine.models.vision import tower as tower_module
from engine.models.vision.positions import bucket_positions
from engine.models.vision.tower import ImageEmbeddings, VisionTower, load_tower
from tests import tiny_vision, tiny_vision_pixels
from tests.image_prompts import allowed, rules_of

CPU = torch.device("cpu")
# Rows and columns of cells: one, fewer than a window of Qwen2.5-VL, whole windows, and windows of
# four shapes.
SIZES = [(1, 1), (2, 3), (5, 2), (4, 8), (9, 6)]


def load(directory: Path, dtype: torch.dtype = torch.float32) -> VisionTower:
    config = read_config(str(directory))
    assert config.vision is not None, config.vision_unsupported_reason
    return load_tower(config.vision, read_headers(directory), dtype, CPU)


def noise(rows: int, columns: int, cell: int) -> np.ndarray:
    """An image with this many cells: [height, width, 3] uint8."""
    shape = (rows * cell, columns * cell, 3)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def expected(model: Any, processor: Any, pixels: np.ndarray) -> ImageEmbeddings:
    """Hugging Face's features of an image that already has its final size."""
    read = tiny_vision_pixels.seen(processor, [pixels])
    with torch.no_grad():
        if model.config.model_type in ("lighton_ocr", "mistral3"):
            # Not ``get_image_features``, which splits up an image of one cell.
            parts = model.model
            if model.config.model_type == "lighton_ocr":
                patches = parts.vision_encoder(**read).last_hidden_state[0]
                return ImageEmbeddings(parts.vision_projection(patches, read["image_sizes"]), ())
            patches = parts.vision_tower(**read).last_hidden_state[0]
            return ImageEmbeddings(parts.multi_modal_projector(patches, read["image_sizes"]), ())
        if model.config.model_type in ("llava_next", "llava_onevision"):
            return ImageEmbeddings(_of_a_tile(model, read["pixel_values"]), ())
        out = model.get_image_features(**read, return_dict=True)
        if model.config.model_type == "llama4":
            return ImageEmbeddings(model.multi_modal_projector(out.last_hidden_state[0]), ())
    deep = getattr(out, "deepstack_features", ())
    return ImageEmbeddings(
        torch.cat(tuple(out.pooler_output)), tuple(torch.cat(own) for own in deep)
    )


def _of_a_tile(model: Any, values: torch.Tensor) -> torch.Tensor:
    """Of models whose ``get_image_features`` takes a view and a canvas."""
    config, parts = model.config, model.model
    layers = config.vision_feature_layer
    states = parts.vision_tower(values, output_hidden_states=True).hidden_states
    chosen = [states[layer] for layer in (layers if isinstance(layers, list) else [layers])]
    first = int(config.vision_feature_select_strategy == "default")
    features = parts.multi_modal_projector(torch.cat(chosen, dim=-1)[:, first:])[0]
    return features * getattr(config.text_config, "embedding_multiplier", 1.0)


def assert_close(found: ImageEmbeddings, wanted: ImageEmbeddings, tolerance: float) -> None:
    """Within a share of the largest value."""
    assert len(found.deepstack) == len(wanted.deepstack)
    for own, other in zip(
        (found.embeddings, *found.deepstack), (wanted.embeddings, *wanted.deepstack), strict=True
    ):
        bound = tolerance * float(other.abs().max())
        torch.testing.assert_close(own.float(), other.float(), atol=bound, rtol=0)


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_embeddings_equal_hugging_faces(tmp_path, monkeypatch, kind):
    """For any number of patches per piece."""
    model = tiny_vision.save(kind, tmp_path)
    processor = tiny_vision_pixels.processor(kind)
    tower = load(tmp_path)
    for rows, columns in dict.fromkeys(allowed(rules_of(tmp_path), SIZES)):
        pixels = noise(rows, columns, tower.spec.cell_size)
        wanted = expected(model, processor, pixels)
        for most in (9, 10**6):
            monkeypatch.setattr(tower_module, "_MAX_PATCHES_ON_CPU", most)
            found = tower.embed(torch.from_numpy(pixels))
            assert found.embeddings.shape == (rows * columns, 48)
            assert_close(found, wanted, 1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        *("qwen2_5_vl", "qwen3_vl", "mistral3", "gemma3", "gemma4", "idefics3", "internvl"),
        *("glm4v", "glm_ocr"),
    ],
)
def test_embeddings_in_bfloat16(tmp_path, kind):
    """Nearly as close to Hugging Face's float32 result as Hugging Face's own bfloat16 result."""
    model = tiny_vision.save(kind, tmp_path)
    tower = load(tmp_path, torch.bfloat16)
    ((rows, columns),) = allowed(rules_of(tmp_path), [(5, 7)])
    pixels = noise(rows, columns, tower.spec.cell_size)
    processor = tiny_vision_pixels.processor(kind)
    wanted = expected(model, processor, pixels)
    found = tower.embed(torch.from_numpy(pixels))
    assert found.embeddings.dtype == torch.bfloat16
    theirs = expected(model.to(torch.bfloat16), processor, pixels)
    for own, other, exact in zip(
        (found.embeddings, *found.deepstack),
        (theirs.embeddings, *theirs.deepstack),
        (wanted.embeddings, *wanted.deepstack),
        strict=True,
    ):
        assert (own.float() - exact).norm() < 1.25 * (other.float() - exact).norm()


def test_positions_that_rounding_moves(tmp_path):
    """Of 50 rows in Idefics3, 22 have the position of the row before, as in Hugging Face's code."""
    moved = bucket_positions(50) != torch.arange(50)
    assert moved.sum() == 22
    model = tiny_vision.save("idefics3", tmp_path, image_size=100, patch_size=2)
    processor = tiny_vision_pixels.processor("idefics3")
    processor.max_image_size = {"longest_edge": 100}
    pixels = noise(25, 25, 4)
    found = load(tmp_path).embed(torch.from_numpy(pixels))
    assert_close(found, expected(model, processor, pixels), 1e-5)


@pytest.mark.parametrize("side", [7, 26, 27, 32])
def test_positions_of_published_models_are_their_own(side):
    assert torch.equal(bucket_positions(side), torch.arange(side))


def test_pixels_are_normalised_as_the_processor_says(tmp_path):
    model = tiny_vision.save("qwen2_vl", tmp_path)
    processor = tiny_vision_pixels.processor("qwen2_vl")
    processor.image_mean, processor.image_std = [0.1, 0.2, 0.3], [0.9, 0.8, 0.7]
    processor.rescale_factor = 1 / 128
    processor.save_pretrained(tmp_path)
    tower = load(tmp_path)
    pixels = noise(2, 2, 28)
    assert_close(tower.embed(torch.from_numpy(pixels)), expected(model, processor, pixels), 1e-5)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "mistral3"])
def test_an_image_has_the_same_bits_whatever_was_computed_before(tmp_path, kind):
    tiny_vision.save(kind, tmp_path)
    tower = load(tmp_path)
    pixels = torch.from_numpy(noise(5, 3, tower.spec.cell_size))
    first = tower.embed(pixels)
    tower.embed(torch.from_numpy(noise(2, 9, tower.spec.cell_size)))
    again = tower.embed(pixels)
    assert torch.equal(first.embeddings, again.embeddings)
    assert all(torch.equal(*pair) for pair in zip(first.deepstack, again.deepstack, strict=True))

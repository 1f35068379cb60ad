"""Hugging Face's image processors for the models of ``tests/tiny_vision.py``, and their output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.tiny_processors import (
    CohereProcessor,
    Gemma4UnifiedProcessor,
    KimiProcessor,
    Lfm2Processor,
    Llama4Processor,
)
from tests.tiny_vision import pinpoints


def processor(kind: str) -> Any:
    """Hugging Face's image processor for it, in the variant without torchvision."""
    import transformers

    if kind == "kimi_k25":
        return KimiProcessor()
    if kind == "gemma4_unified":
        return Gemma4UnifiedProcessor(4, 2, 70)
    if kind == "llama4":
        return Llama4Processor(28)
    if kind == "minicpmv4_6":
        return transformers.MiniCPMV4_6ImageProcessorPil(scale_resolution=48, patch_size=4)
    if kind.startswith("llava_next"):
        side = 28 if kind == "llava_next" else 30
        return transformers.LlavaNextImageProcessorPil(
            size={"shortest_edge": side},
            crop_size={"height": side, "width": side},
            image_grid_pinpoints=pinpoints(side),
        )
    if kind == "llava_onevision":
        return transformers.LlavaOnevisionImageProcessorPil(
            size={"height": 30, "width": 30}, image_grid_pinpoints=pinpoints(30)
        )
    if kind == "lfm2_vl":
        return Lfm2Processor(4, 16, 2, 6)
    if kind == "cohere2_vision":
        return CohereProcessor(18, patch_size=3)
    if kind == "aya_vision":
        return transformers.GotOcr2ImageProcessorPil(
            size={"height": 28, "width": 28}, image_mean=[0.5] * 3, image_std=[0.5] * 3
        )
    if kind == "paddleocr_vl":
        return transformers.PaddleOCRVLImageProcessorPil()
    if kind == "llava_clip":
        square = {"height": 28, "width": 28}
        return transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=square)
    if kind == "llava_siglip":  # exactly three cells of 14 pixels
        square = {"height": 44, "width": 44}
        return transformers.SiglipImageProcessorPil(size=square)
    if kind == "llava_pixtral":
        return transformers.PixtralImageProcessorPil()
    if kind == "idefics3":
        tile, longest = {"longest_edge": 28}, {"longest_edge": 84}
        return transformers.Idefics3ImageProcessorPil(size=longest, max_image_size=tile)
    if kind == "smolvlm":
        tile, longest = {"longest_edge": 30}, {"longest_edge": 60}
        return transformers.SmolVLMImageProcessorPil(size=longest, max_image_size=tile)
    if kind.startswith("internvl"):
        square = {"height": 28, "width": 28}
        mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
        return transformers.GotOcr2ImageProcessorPil(size=square, image_mean=mean, image_std=std)
    if kind == "gemma3":
        return transformers.Gemma3ImageProcessorPil(size={"height": 84, "width": 84})
    if kind.startswith("gemma4"):
        return transformers.Gemma4ImageProcessorPil(
            patch_size=8, pooling_kernel_size=2, max_soft_tokens=70
        )
    if kind.startswith("mistral3") or kind == "lighton_ocr":
        return transformers.PixtralImageProcessorPil(patch_size={"height": 14, "width": 14})
    if kind.startswith("glm"):
        return transformers.Glm4vImageProcessorPil(
            size={"shortest_edge": 2 * 28**2, "longest_edge": 2 * 28**2 * 40}
        )
    if kind.startswith("qwen3"):
        half = [0.5, 0.5, 0.5]
        return transformers.Qwen2VLImageProcessorPil(patch_size=16, image_mean=half, image_std=half)
    return transformers.Qwen2VLImageProcessorPil()


def seen(processor: Any, images: Sequence[np.ndarray]) -> Any:
    """An image [height, width, 3] after ``processor``, at the size that the model sees.

    If all images or tiles have one size, what the model does not see of it is black.
    """
    if hasattr(processor, "image_grid_pinpoints"):
        return {"pixel_values": tiles(processor, images)[0]}
    if hasattr(processor, "slice_mode"):
        return _prepared(processor, images, slice_mode=False)
    size = processor.size
    sides = size and (size.height, size.width)
    if hasattr(processor, "max_image_size"):  # of a tile
        sides = (processor.max_image_size["longest_edge"],) * 2
    if sides is None or None in sides:
        return _prepared(processor, images)
    whole = np.zeros((len(images), *sides, 3), np.uint8)
    for image, into in zip(images, whole, strict=True):
        into[: image.shape[0], : image.shape[1]] = image
    return _prepared(processor, list(whole))


def tiles(processor: Any, images: Sequence[np.ndarray]) -> list[Any]:
    """The tiles of canvases [height, width, 3], each [num_tiles, 3, side, side], normalised."""
    import torch

    side = processor.size.height or processor.size.shortest_edge
    kept = side // 14 * 14  # pixels in whole patches
    mean, std = (np.float32(each) for each in (processor.image_mean, processor.image_std))
    found = []
    for canvas in images:
        rows, columns = (length // kept for length in canvas.shape[:2])
        cut = canvas.reshape(rows, kept, columns, kept, 3).swapaxes(1, 2).reshape(-1, kept, kept, 3)
        whole = np.zeros((len(cut), side, side, 3), np.float32)
        whole[:, :kept, :kept] = (cut / np.float32(255) - mean) / std
        found.append(torch.from_numpy(whole.transpose(0, 3, 1, 2).copy()))
    return found


def _prepared(processor: Any, images: Sequence[np.ndarray], **options: Any) -> Any:
    found = processor(list(images), do_resize=False, return_tensors="pt", **options)
    for unread in ("num_crops", "num_patches", "num_soft_tokens_per_image"):
        found.pop(unread, None)
    for unread in ("grids", "num_patches_per_image"):
        found.pop(unread, None)
    return found

"""Hugging Face's video processors, run without torchvision: a program for a process of its own.

    python -m tests.engine.video.reference CASES.json RESULTS.npz

Cases are objects with the processor's module and class, its settings, the video's size, number of
frames, rate and seed. Results are the numbers of the frames it chose, its grid, and its pixels.
torchvision is replaced by the few functions of torch that these processors call through it.
"""

from __future__ import annotations

import enum
import importlib.machinery
import json
import sys
import types
from typing import Any

import numpy as np
import torch

_NAMES = (
    *("torchvision", "torchvision.io", "torchvision.transforms"),
    *("torchvision.transforms.functional", "torchvision.transforms.v2"),
    "torchvision.transforms.v2.functional",
)


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BOX = "box"
    BILINEAR = "bilinear"
    HAMMING = "hamming"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def resize(image: Any, size: Any, interpolation: InterpolationMode, antialias: bool = True) -> Any:
    """As torchvision: on the bytes themselves."""
    if list(image.shape[-2:]) == list(size):
        return image
    flat = image.reshape(-1, *image.shape[-3:])
    mode = interpolation.value
    scaled = torch.nn.functional.interpolate(flat, tuple(size), mode=mode, antialias=antialias)
    return scaled.reshape(*image.shape[:-2], *size)


def normalize(image: Any, mean: Any, std: Any, inplace: bool = False) -> Any:
    shape = (-1, 1, 1)
    mean, std = torch.as_tensor(mean), torch.as_tensor(std)
    return (image - mean.view(shape)) / std.view(shape)


def install() -> None:
    """Put the replacement where transformers looks for torchvision."""
    for name in _NAMES:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    given = {
        **{"InterpolationMode": InterpolationMode, "resize": resize, "normalize": normalize},
        **{"pil_to_tensor": None, "grayscale_to_rgb": lambda image: image},
        "__version__": "0.26.0",
    }
    for name in _NAMES:
        vars(sys.modules[name]).update(given)


def frames_of(case: dict[str, Any]) -> np.ndarray:
    """[num_frames, height, width, 3] uint8, smooth enough to be scaled alike."""
    rng = np.random.default_rng(case["seed"])
    height, width = case["size"]
    coarse = rng.integers(0, 256, (case["num_frames"], 3, 4, 4)).astype(np.float32)
    whole = torch.nn.functional.interpolate(
        torch.from_numpy(coarse), (height, width), mode="bilinear"
    )
    return whole.permute(0, 2, 3, 1).round().numpy().astype(np.uint8)


def main(cases_file: str, results_file: str) -> None:
    install()
    from transformers.utils import import_utils

    for name in ("is_torchvision_available", "is_torchvision_v2_available"):
        setattr(import_utils, name, lambda: True)
    results: dict[str, np.ndarray] = {}
    with open(cases_file, encoding="utf-8") as file:
        cases = json.load(file)
    for number, case in enumerate(cases):
        kind = case["module"]
        module = importlib.import_module(f"transformers.models.{kind}.video_processing_{kind}")
        processor = getattr(module, case["class"])(**case.get("settings", {}))
        frames = frames_of(case)
        count, rate = len(frames), case["fps"]
        metadata = {"total_num_frames": count, "fps": rate, "duration": count / rate}
        asked = {"do_sample_frames": True, "return_metadata": True, **case.get("asked", {})}
        found = processor(
            [torch.from_numpy(frames).permute(0, 3, 1, 2)],
            video_metadata=[metadata],
            return_tensors="pt",
            **asked,
        )
        results[f"{number}.indices"] = np.asarray(found["video_metadata"][0].frames_indices)
        for key in ("video_grid_thw", "pixel_values_videos", "pixel_values"):
            if key in found:
                results[f"{number}.{key}"] = np.asarray(found[key])
    np.savez(results_file, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Image processors whose Hugging Face code needs torchvision, as the published steps in numpy."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def _as_array(image: Any) -> np.ndarray:
    return np.asarray(image.convert("RGB") if isinstance(image, Image.Image) else image)


class KimiProcessor:
    """Kimi K2.5's: scaled down within limits, and completed to whole cells with black pixels."""

    size = None
    patch = 14
    merge = 2

    def __init__(self, max_patches: int = 16_384, max_side: int = 512) -> None:
        self.max_patches, self.max_side = max_patches, max_side

    def __call__(self, images: Sequence[Any], do_resize: bool = True, **_: Any) -> dict[str, Any]:
        import torch

        patches, grids = [], []
        for image in images:
            array = self.pixels(_as_array(image)) if do_resize else _as_array(image)
            rows, columns = (side // self.patch for side in array.shape[:2])
            cut = array.reshape(rows, self.patch, columns, self.patch, 3).transpose(0, 2, 4, 1, 3)
            patches.append((cut.reshape(-1, 3, self.patch, self.patch) / 255 - 0.5) / 0.5)
            grids.append([1, rows, columns])
        values = torch.from_numpy(np.concatenate(patches)).float()
        return {"pixel_values": values, "image_grid_thw": torch.tensor(grids)}

    def pixels(self, array: np.ndarray) -> np.ndarray:
        """[height, width, 3] uint8, before normalisation."""
        height, width, _ = array.shape
        longest = self.patch * self.max_side
        count = max(1.0, height // self.patch) * max(1.0, width // self.patch)
        scale = min(1.0, math.sqrt(self.max_patches / count), longest / height, longest / width)
        height, width = (min(max(1, int(side * scale)), longest) for side in (height, width))
        scaled = Image.fromarray(array).resize((width, height), Image.Resampling.BICUBIC)
        below, right = (-side % (self.patch * self.merge) for side in (height, width))
        return np.pad(np.asarray(scaled), ((0, below), (0, right), (0, 0)))

    def save_pretrained(self, directory: Path) -> None:
        """Write the published file."""
        settings = {
            **{"in_patch_limit": self.max_patches, "patch_limit_on_one_side": self.max_side},
            **{"patch_size": self.patch, "merge_kernel_size": self.merge, "sample_fps": 2.0},
            **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
            **{"fixed_output_tokens": None, "temporal_merge_kernel_size": 4},
        }
        whole = {"auto_map": {"AutoImageProcessor": "kimi.KimiProcessor"}}
        whole |= {"media_proc_cfg": settings}
        (directory / "preprocessor_config.json").write_text(json.dumps(whole))

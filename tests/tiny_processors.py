"""Image processors whose Hugging Face code needs torchvision, as the published steps in numpy."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

_BICUBIC = Image.Resampling.BICUBIC
_CLIP_MEAN = np.array([0.48145466, 0.4578275, 0.40821073])[:, None, None]
_CLIP_STD = np.array([0.26862954, 0.26130258, 0.27577711])[:, None, None]


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
        scaled = Image.fromarray(array).resize((width, height), _BICUBIC)
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


class CohereProcessor:
    """Command A Vision's: cut into the tiles of the grid that needs the least scaling."""

    def __init__(self, side: int, patch_size: int, max_patches: int = 12) -> None:
        self.size = SimpleNamespace(height=side, width=side)
        self.side, self.patch_size, self.max_patches = side, patch_size, max_patches

    def __call__(self, images: Sequence[Any], do_resize: bool = True, **_: Any) -> dict[str, Any]:
        import torch

        counts, found = [], []
        for image in images:
            array = _as_array(image)
            tiles = self.tiles(array) if do_resize else [array]
            counts.append(len(tiles))
            found += [(tile.transpose(2, 0, 1) / 255 - _CLIP_MEAN) / _CLIP_STD for tile in tiles]
        return {"pixel_values": torch.from_numpy(np.stack(found)).float(), "num_patches": counts}

    def fetch_images(self, images: Any) -> Any:
        """The images, none of which is at an address."""
        return images

    def tiles(self, array: np.ndarray) -> list[np.ndarray]:
        """Each [side, side, 3] uint8: row by row, and the whole image last if there are several."""
        height, width, _ = array.shape
        sides = range(1, self.max_patches + 1)
        grids = [(columns, rows) for columns in sides for rows in sides]
        grids = sorted((g for g in grids if g[0] * g[1] <= self.max_patches), key=math.prod)
        scales = np.array(grids) * self.side / np.array([width, height])
        scale = scales.min(axis=1)
        best = scale.argmax() if (scale < 1).all() else np.where(scale < 1, 1e10, scale).argmin()
        columns, rows = grids[best]
        image = Image.fromarray(array)
        scaled = np.asarray(image.resize((columns * self.side, rows * self.side), _BICUBIC))
        cut = scaled.reshape(rows, self.side, columns, self.side, 3).swapaxes(1, 2)
        tiles = list(cut.reshape(-1, self.side, self.side, 3))
        if len(tiles) > 1:
            tiles.append(np.asarray(image.resize((self.side, self.side), _BICUBIC)))
        return tiles

    def save_pretrained(self, directory: Path) -> None:
        """Write the file that Hugging Face's own would be."""
        settings = {
            **{"size": {"height": self.side, "width": self.side}, "patch_size": self.patch_size},
            **{"min_patches": 1, "max_patches": self.max_patches, "crop_to_patches": True},
            **{"image_processor_type": "Cohere2VisionImageProcessorFast", "resample": 3},
        }
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))

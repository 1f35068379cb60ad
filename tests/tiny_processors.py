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

_BICUBIC, _BILINEAR = Image.Resampling.BICUBIC, Image.Resampling.BILINEAR
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


class Lfm2Processor:
    """LFM2-VL's: scaled to an area, and if it is much larger, cut into tiles before that."""

    def __init__(self, patch: int = 16, tile: int = 512, least: int = 64, most: int = 256) -> None:
        self.size = None
        self.patch, self.tile, self.least, self.most = patch, tile, least, most
        self.max_tiles, self.use_thumbnail = 10, True
        self.tile_size, self.encoder_patch_size, self.downsample_factor = tile, patch, 2

    def __call__(self, images: Sequence[Any], do_resize: bool = True, **_: Any) -> dict[str, Any]:
        import torch

        found: dict[str, list[Any]] = {"image_rows": [], "image_cols": [], "image_sizes": []}
        shown = []
        for image in _flat(images):
            array = _as_array(image)
            tiles, rows, columns = self.tiles(array) if do_resize else ([array], 1, 1)
            found["image_rows"].append(rows)
            found["image_cols"].append(columns)
            found["image_sizes"].append(tiles[-1].shape[:2])
            shown += tiles
        shapes = [[side // self.patch for side in tile.shape[:2]] for tile in shown]
        longest = max(rows * columns for rows, columns in shapes)
        values = np.zeros((len(shown), longest, 3 * self.patch**2), np.float32)
        mask = np.zeros((len(shown), longest), np.int64)
        for i, (tile, (rows, columns)) in enumerate(zip(shown, shapes, strict=True)):
            cut = tile.reshape(rows, self.patch, columns, self.patch, 3).swapaxes(1, 2)
            values[i, : rows * columns] = cut.reshape(rows * columns, -1) / 127.5 - 1
            mask[i, : rows * columns] = 1
        extra = found if do_resize else {}
        return {
            **{"pixel_values": torch.from_numpy(values), "spatial_shapes": torch.tensor(shapes)},
            **{"pixel_attention_mask": torch.from_numpy(mask), **extra},
        }

    def fetch_images(self, images: Any) -> Any:
        """The images, none of which is at an address."""
        return images

    def tiles(self, array: np.ndarray) -> tuple[list[np.ndarray], int, int]:
        """Each [height, width, 3] uint8, the whole image last; rows and columns of tiles."""
        height, width, _ = array.shape
        cell = 2 * self.patch
        image, area = Image.fromarray(array), cell**2
        rows, columns = self._whole(height, width)
        whole = np.asarray(image.resize((columns, rows), _BILINEAR))
        rounded = round(height / cell) * round(width / cell)
        if rounded * area <= self.most * area * 2.0:
            return [whole], 1, 1
        sides = range(1, self.max_tiles + 1)
        grids = [(w, h) for w in sides for h in sides if 2 <= w * h <= self.max_tiles]
        best, least = (1, 1), math.inf
        for columns, rows in sorted(grids, key=math.prod):
            distance = abs(width / height - columns / rows)
            fills = height * width > 0.5 * self.tile**2 * columns * rows
            if distance < least or (distance == least and fills):
                best, least = (columns, rows), distance
        columns, rows = best
        scaled = image.resize((columns * self.tile, rows * self.tile), _BILINEAR)
        cut = np.asarray(scaled).reshape(rows, self.tile, columns, self.tile, 3).swapaxes(1, 2)
        return [*cut.reshape(-1, self.tile, self.tile, 3), whole], rows, columns

    def _whole(self, height: int, width: int) -> tuple[int, int]:
        cell = 2 * self.patch
        sides = [max(cell, round(side / cell) * cell) for side in (height, width)]
        least, most = self.least * cell**2, self.most * cell**2
        if math.prod(sides) > most:
            beta = math.sqrt(height * width / most)
            sides = [max(cell, int(side / beta / cell) * cell) for side in (height, width)]
        elif math.prod(sides) < least:
            beta = math.sqrt(least / (height * width))
            sides = [math.ceil(side * beta / cell) * cell for side in (height, width)]
        return sides[0], sides[1]

    def save_pretrained(self, directory: Path) -> None:
        """Write the file that Hugging Face's own would be."""
        settings = {
            **{"encoder_patch_size": self.patch, "downsample_factor": 2, "tile_size": self.tile},
            **{"min_image_tokens": self.least, "max_image_tokens": self.most, "min_tiles": 2},
            **{"max_tiles": self.max_tiles, "max_pixels_tolerance": 2.0, "use_thumbnail": True},
            **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2, "do_pad": True},
            **{"do_image_splitting": True, "size": {"height": self.tile, "width": self.tile}},
            **{"max_num_patches": 1024, "return_row_col_info": True},
            "image_processor_type": "Lfm2VlImageProcessorFast",
        }
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))


class Llama4Processor:
    """Llama 4's: scaled onto a canvas of tiles, and the whole image if there are several."""

    def __init__(self, side: int, most: int = 16, grows: bool = False) -> None:
        self.size = SimpleNamespace(height=side, width=side)
        self.side, self.most, self.grows = side, most, grows

    def __call__(self, images: Sequence[Any], do_resize: bool = True, **_: Any) -> dict[str, Any]:
        import torch

        ratios, found = [], []
        for image in images:
            array = _as_array(image)
            tiles, ratio = self.tiles(array) if do_resize else ([array], (1, 1))
            ratios.append(ratio)
            found += [(tile.transpose(2, 0, 1) / 255 - 0.5) / 0.5 for tile in tiles]
        values = torch.from_numpy(np.stack(found)).float()
        extra = {"aspect_ratios": torch.tensor(ratios)} if do_resize else {}
        return {"pixel_values": values, **extra}

    def fetch_images(self, images: Any) -> Any:
        """The images, none of which is at an address."""
        return images

    def tiles(self, array: np.ndarray) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Each [side, side, 3] uint8, the whole image last if there are several; their grid."""
        import torch

        height, width, _ = array.shape
        grids: dict[float, list[tuple[int, int]]] = {}
        for count in range(self.most, 0, -1):
            for rows in (n for n in range(1, count + 1) if count % n == 0):
                grids.setdefault(rows * rows / count, []).append((rows, count // rows))
        canvases = torch.tensor([grid for same in grids.values() for grid in same]) * self.side
        scales = torch.minimum(canvases[:, 0] / height, canvases[:, 1] / width)
        up = scales[scales >= 1]
        best = (up.max() if self.grows else up.min()) if len(up) else scales.max()
        chosen = canvases[scales == best]
        tall, wide = chosen[chosen.prod(1).argmin()].tolist()
        limit = [tall, wide]
        if not self.grows:
            limit = [min(max(height, self.side), tall), min(max(width, self.side), wide)]
        by_width, by_height = limit[1] / width, limit[0] / height
        if by_width < by_height:
            size = limit[1], min(math.floor(height * by_width), limit[0])
        else:
            size = min(math.floor(width * by_height), limit[1]), limit[0]
        image = Image.fromarray(array)
        scaled = np.asarray(image.resize((max(size[0], 1), max(size[1], 1)), _BILINEAR))
        canvas = np.zeros((tall, wide, 3), np.uint8)
        canvas[: scaled.shape[0], : scaled.shape[1]] = scaled
        rows, columns = tall // self.side, wide // self.side
        cut = canvas.reshape(rows, self.side, columns, self.side, 3).swapaxes(1, 2)
        tiles = list(cut.reshape(-1, self.side, self.side, 3))
        if len(tiles) > 1:
            tiles.append(np.asarray(image.resize((self.side, self.side), _BILINEAR)))
        return tiles, (rows, columns)

    def save_pretrained(self, directory: Path) -> None:
        """Write the file that Hugging Face's own would be."""
        settings = {
            **{"size": {"height": self.side, "width": self.side}, "resample": 2},
            **{"max_patches": self.most, "resize_to_max_canvas": self.grows},
            **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_convert_rgb": True},
            **{"image_processor_type": "Llama4ImageProcessorFast", "do_center_crop": None},
        }
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))


class Gemma4UnifiedProcessor:
    """That of Gemma 4 12B: scaled as for other Gemma 4 models, and cut into whole cells."""

    size = None

    def __init__(self, patch: int, merge: int, most: int) -> None:
        self.cell, self.most = patch * merge, most
        self.settings = {"patch_size": patch, "pooling_kernel_size": merge, "max_soft_tokens": most}

    def __call__(self, images: Sequence[Any], do_resize: bool = True, **_: Any) -> dict[str, Any]:
        import torch

        patches = np.zeros((len(_flat(images)), self.most, 3 * self.cell**2), np.float32)
        places = np.full((len(patches), self.most, 2), -1)
        counts = []
        for image, own, at in zip(_flat(images), patches, places, strict=True):
            array = _as_array(image)
            if do_resize:
                array = self.scaled(array)
            rows, columns = (side // self.cell for side in array.shape[:2])
            cut = array.reshape(rows, self.cell, columns, self.cell, 3).swapaxes(1, 2)
            counts.append(rows * columns)
            own[: counts[-1]] = cut.reshape(counts[-1], -1) / 255
            at[: counts[-1]] = [(x, y) for y in range(rows) for x in range(columns)]
        return {
            **{"pixel_values": torch.from_numpy(patches)},
            **{"image_position_ids": torch.from_numpy(places)},
            "num_soft_tokens_per_image": counts,
        }

    def fetch_images(self, images: Any) -> Any:
        """The images, none of which is at an address."""
        return images

    def scaled(self, array: np.ndarray) -> np.ndarray:
        """[height, width, 3] uint8, in the size that the model sees."""
        from transformers.models.gemma4 import image_processing_pil_gemma4 as theirs

        patch, merge = self.settings["patch_size"], self.settings["pooling_kernel_size"]
        height, width = theirs.get_aspect_ratio_preserving_size(
            *array.shape[:2], patch, self.most * merge**2, merge
        )
        return np.asarray(Image.fromarray(array).resize((width, height), _BICUBIC))

    def save_pretrained(self, directory: Path) -> None:
        """Write the file that Hugging Face's own would be."""
        settings = {
            **{**self.settings, "image_processor_type": "Gemma4UnifiedImageProcessor"},
            **{"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "rescale_factor": 1 / 255},
            **{"do_normalize": False, "do_rescale": True, "do_resize": True, "resample": 3},
        }
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))


def _flat(images: Any) -> list[Any]:
    nested = isinstance(images, list) and images and isinstance(images[0], list)
    return [image for inner in images for image in inner] if nested else list(images)

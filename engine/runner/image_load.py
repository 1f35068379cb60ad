"""Image decisions that precede loading weights, and loading the vision tower."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import msgspec
import torch

from engine.config import EngineConfig
from engine.images.types import (
    AnyresScaling,
    AreaScaling,
    BudgetScaling,
    CornerScaling,
    EdgeScaling,
    FixedScaling,
    GridScaling,
    ImageRules,
    PaddedScaling,
    Scaling,
    SliceScaling,
    SplitScaling,
    TileScaling,
)
from engine.models.checkpoint import ModelConfig
from engine.models.spec import DecoderSpec
from engine.models.vision.config import VisionConfig
from engine.models.vision.tower import VisionTower, load_tower, tower_unsupported_reason
from engine.parallel.stages import stage_layers
from engine.runner.media_encoders import ImageEncoder
from engine.runner.video_load import max_part_cells, plan_video
from engine.runner.weight_files import WeightFiles
from engine.video.types import VideoRules

logger = logging.getLogger(__name__)

# Default limit of an image's tokens on a CPU: full-size telephone photographs would have 16,000 and
# take minutes.
_MAX_CPU_IMAGE_TOKENS = 1024
# Lower bound of cells whose embeddings are cached: enough for several images of usual size.
_MIN_CACHED_CELLS = 4096


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """How a model takes images."""

    vision: VisionConfig
    rules: ImageRules
    uses_mrope: bool  # image tokens have three-dimensional positions
    video: VideoRules | None = None  # None: it takes no videos

    @property
    def table_cell(self) -> int | None:
        """The ``image_cell`` of the ``RowTable``."""
        return self.rules.cell if self.uses_mrope else None

    @property
    def max_image_cells(self) -> int:
        """Cells of the largest image."""
        return _max_image_cells(self.rules)

    @property
    def num_cached_cells(self) -> int:
        """Cells whose embeddings are cached at once."""
        of_video = 0 if self.video is None else self.video.max_tokens or 0
        return max(_MIN_CACHED_CELLS, self.max_image_cells, of_video)

    def load(self, files: WeightFiles, dtype: torch.dtype, device: torch.device) -> VisionTower:
        """Load the vision tower. Raises ModelLoadError."""
        return load_tower(self.vision, files.headers, dtype, device, files.seed)

    def num_bytes(self, spec: DecoderSpec, tower: VisionTower, dtype: torch.dtype) -> int:
        """The memory that reading images takes besides the vision tower's weights."""
        states = 1 + len(self.vision.spec.deepstack_layers)
        kept = self.num_cached_cells * states * spec.hidden_size * dtype.itemsize
        encoded = _encoded_cells(self.rules)
        if self.video is not None:
            encoded = max(encoded, max_part_cells(self.video))
        if isinstance(self.rules.scaling, AnyresScaling):  # tiles, joined, cut, interpolated, ended
            kept += 5 * self.max_image_cells * spec.hidden_size * dtype.itemsize
        return kept + tower.activation_bytes(encoded)

    def encoder(self, tower: VisionTower, device: torch.device) -> ImageEncoder:
        """Make the runner's image reader."""
        return ImageEncoder(tower, self.rules, device)


def plan_images(
    config: EngineConfig,
    model: ModelConfig,
    files: WeightFiles,
    spec: DecoderSpec,
    device: torch.device,
) -> ImagePlan | None:
    """Decide how the model takes images; None if it takes none, with the reason logged."""
    if not config.max_images or not spec.is_generative:
        return None
    vision, reason = model.vision, model.vision_unsupported_reason
    if vision is not None:
        reason = _refusal(config, vision, files, spec)
    if reason is not None:
        logger.info("images are not taken: %s", reason)
    if vision is None or reason is not None:
        return None
    rules = msgspec.structs.replace(
        vision.rules, max_images=config.max_images, is_bidirectional=spec.bidirectional_images
    )
    most = config.max_image_tokens or (_MAX_CPU_IMAGE_TOKENS if device.type == "cpu" else None)
    is_fixed = isinstance(rules.scaling, FixedScaling)
    if most is not None and most < _max_image_cells(rules) and not is_fixed:
        logger.info("images are scaled to %d tokens at most: --max-image-tokens", most)
        rules = msgspec.structs.replace(rules, scaling=_within(rules, most))
    uses_mrope = any(rope.mrope is not None for rope in spec.ropes)
    return ImagePlan(vision, rules, uses_mrope, plan_video(config, vision, device))


def _max_image_cells(rules: ImageRules) -> int:
    """Return the cells of the largest image."""
    scaling = rules.scaling
    if isinstance(scaling, (TileScaling, GridScaling, CornerScaling, SliceScaling)):
        return scaling.max_tiles * _tile_cells(rules)
    if isinstance(scaling, SplitScaling):
        return scaling.max_tiles * _tile_cells(rules) + scaling.max_pixels // rules.cell**2
    if isinstance(scaling, AnyresScaling):
        most = [scaling.max_cells(grid, rules.cell) for grid in scaling.grids]
        return max(most, default=_tile_cells(rules) + 1)
    if isinstance(scaling, AreaScaling):
        return scaling.max_pixels // (scaling.num_frames * rules.cell**2)
    if isinstance(scaling, (BudgetScaling, PaddedScaling)):
        return scaling.max_cells
    longest = scaling.longest if isinstance(scaling, EdgeScaling) else scaling.side
    return (-(-longest // rules.cell)) ** 2


def _encoded_cells(rules: ImageRules) -> int:
    """Return the most cells that are embedded at once: of an image, or of a tile."""
    scaling = rules.scaling
    if isinstance(scaling, SplitScaling):
        whole = scaling.max_pixels // rules.cell**2
        return max(whole, _tile_cells(rules) if scaling.max_tiles else 0)
    return _tile_cells(rules) or _max_image_cells(rules)


def _tile_cells(rules: ImageRules) -> int:
    """Return the cells of a tile; 0: images are not cut."""
    scaling = rules.scaling
    if isinstance(scaling, SliceScaling):
        return scaling.max_cells(rules.cell)
    tiled = TileScaling, GridScaling, CornerScaling, SplitScaling, AnyresScaling
    if isinstance(scaling, tiled):
        return (scaling.side // rules.cell) ** 2
    return 0


def _within(rules: ImageRules, most: int) -> Scaling:
    """Return the same scaling, limited to ``most`` cells, but not to less than one tile."""
    scaling = rules.scaling
    if isinstance(scaling, (TileScaling, GridScaling, CornerScaling, SliceScaling)):
        num_cut = most // _tile_cells(rules) - 1  # beside the whole image
        if isinstance(scaling, (CornerScaling, SliceScaling)):
            return msgspec.structs.replace(scaling, max_cut=max(num_cut, 1))
        if isinstance(scaling, GridScaling):
            num_cut = num_cut if num_cut > 1 else 1
            least = min(scaling.min_cut, num_cut)
            return msgspec.structs.replace(scaling, min_cut=least, max_cut=num_cut)
        longest = scaling.side * math.isqrt(max(num_cut, 1))
        return TileScaling(scaling.side, longest - longest % 2, scaling.cuts)
    if isinstance(scaling, SplitScaling):
        limit = min(scaling.max_pixels, most * rules.cell**2)
        num_cut = (most - limit // rules.cell**2) // _tile_cells(rules)
        if num_cut < max(scaling.min_cut, 2):
            num_cut = 1
        return msgspec.structs.replace(
            scaling,
            min_cut=min(scaling.min_cut, num_cut),
            max_cut=min(scaling.max_cut, num_cut),
            min_pixels=min(scaling.min_pixels, limit),
            max_pixels=limit,
        )
    if isinstance(scaling, AreaScaling):
        limit = most * scaling.num_frames * rules.cell**2
        least = min(scaling.min_pixels, limit)
        return msgspec.structs.replace(scaling, min_pixels=least, max_pixels=limit)
    if isinstance(scaling, AnyresScaling):
        fitting = (grid for grid in scaling.grids if scaling.max_cells(grid, rules.cell) <= most)
        return msgspec.structs.replace(scaling, grids=tuple(fitting))
    if isinstance(scaling, BudgetScaling):
        return BudgetScaling(most)
    if isinstance(scaling, PaddedScaling):
        return msgspec.structs.replace(scaling, max_cells=most)
    return EdgeScaling(math.isqrt(most) * rules.cell)


def _refusal(
    config: EngineConfig, vision: VisionConfig, files: WeightFiles, spec: DecoderSpec
) -> str | None:
    num_deep, num_first = len(vision.spec.deepstack_layers), spec.num_layers - 1
    if config.pipeline_parallel_size > 1:
        (_, num_first), *_ = stage_layers(spec, config.pipeline_parallel_size)
    if num_deep > num_first:
        return f"{num_deep} layers are told of them, and {num_first} could be"
    if vision.spec.out_size != spec.hidden_size:
        return f"they become {vision.spec.out_size} numbers, tokens have {spec.hidden_size}"
    each, most = _max_image_cells(vision.rules), config.max_image_tokens
    if isinstance(vision.rules.scaling, FixedScaling) and most is not None and most < each:
        return f"they have {each} tokens each, more than --max-image-tokens"
    tile = 0 if isinstance(vision.rules.scaling, SplitScaling) else _tile_cells(vision.rules)
    tile += isinstance(vision.rules.scaling, AnyresScaling)
    if most is not None and most < tile:
        return f"a tile of them has {tile} tokens, more than --max-image-tokens"
    if spec.bidirectional_images:
        windows = [
            layer.window for layer in spec.layers if layer.bidirectional_images and layer.window
        ]
        if windows and min(windows) < _max_image_cells(vision.rules):
            return f"their tokens see each other, beyond a window of {min(windows)} positions"
        if config.batch_invariant:
            return "their tokens see each other, and --batch-invariant computes each by itself"
    return tower_unsupported_reason(files.headers) if files.seed is None else None

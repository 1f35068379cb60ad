"""Read a model's vision encoder from the files of its directory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError
from engine.images.types import BudgetScaling, FixedScaling, ImageRules, Scaling
from engine.models.config_reader import ConfigReader
from engine.models.spec import DecoderSpec
from engine.models.vision.families import FAMILIES
from engine.models.vision.processor import read_processing
from engine.models.vision.spec import VisionSpec
from engine.models.vision.video import VideoInputs
from engine.video.types import VideoRules

_MAX_IMAGES = 16  # default limit per prompt


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """How a model reads images, and which tokens represent them."""

    spec: VisionSpec
    rules: ImageRules
    video: VideoRules | None = None  # None: the model takes no videos
    video_unsupported_reason: str | None = None  # why not, if it is known to


def read_vision(config: dict[str, Any], directory: Path, text: DecoderSpec) -> VisionConfig | None:
    """Read a model directory's vision part.

    Args:
        config: its parsed config.json.
        directory: its path; the processor's files are read if they exist.
        text: the text model.

    Returns:
        None if the config has no vision part, or one of an unsupported family.

    Raises:
        ModelLoadError: the vision part or a processor's file cannot be served; a one-line reason.
            The text model can still be served.
    """
    family = FAMILIES.get(text.architecture)
    if family is None:
        return None
    whole = ConfigReader(config)
    if family.section:
        whole = whole.section(family.section)
        assert whole is not None, "the text model was read from it"
    reader = whole.section("vision_config")
    if reader is None:
        return None
    for key in ("dtype", "torch_dtype"):
        reader.ignore(key)
    spec = family.read(whole, reader, text)
    reader.finish()
    if spec.out_size != text.hidden_size:
        raise whole.error(
            "vision_config",
            f"makes embeddings of {spec.out_size} dimensions, the text model reads "
            f"{text.hidden_size}",
        )
    if len(spec.deepstack_layers) > text.num_layers:
        raise whole.error("vision_config", "has more deep layers than the text model has layers")
    tokens = family.tokens(whole, directory)
    ids = (tokens.token_id, tokens.row_end_id or 0, tokens.end_id or 0)
    if max(ids) >= text.vocab_size:
        raise whole.error("vision_config", "needs tokens for images that lie beyond the vocabulary")
    scaling = family.scaling(spec) if callable(family.scaling) else family.scaling
    if spec.image_size is not None:
        scaling = FixedScaling(spec.image_size, crop=spec.class_token)
        if family.tiling is not None:
            scaling = family.tiling(spec.image_size)
        if family.canvases is not None:
            scaling = family.canvases(whole, spec)
    assert scaling is not None, "a family of images of one size has an encoder of such"
    processing = read_processing(directory, spec, scaling, family.resampling)
    _check_positions(whole, spec, processing.scaling)
    spec = replace(spec, architecture=text.architecture, pixels=processing.pixels)
    rules = ImageRules(
        token_id=tokens.token_id,
        row_end_id=tokens.row_end_id,
        end_id=tokens.end_id,
        cell=spec.cell_size,
        scaling=processing.scaling,
        resampling=processing.resampling,
        rewriting=tokens.rewriting,
        max_images=_MAX_IMAGES,
    )
    if family.video is None:
        return VisionConfig(spec, rules)
    try:
        video = family.video(VideoInputs(whole, directory, spec, rules))
        if video.cell_token_id >= text.vocab_size:
            raise whole.error("video_token_id", "lies beyond the vocabulary")
    except ModelLoadError as error:
        return VisionConfig(spec, rules, video_unsupported_reason=str(error))
    return VisionConfig(spec, rules, video)


def _check_positions(whole: ConfigReader, spec: VisionSpec, scaling: Scaling) -> None:
    """Check that every patch of the longest image within the budget has a position."""
    if not isinstance(scaling, BudgetScaling):
        return
    longest = scaling.max_cells * spec.merge_size
    if longest > spec.num_axis_positions:
        raise whole.error(
            "vision_config",
            f"has positions for {spec.num_axis_positions} patches along a side, images of "
            f"{scaling.max_cells} tokens have {longest}",
        )

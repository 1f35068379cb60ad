"""The encoder of a model that reads images, from the files of its directory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.images.nouns import FixedScaling, ImageRules
from engine.models.config_reader import ConfigReader
from engine.models.spec import DecoderSpec
from engine.models.vision.families import FAMILIES
from engine.models.vision.processor import read_processing
from engine.models.vision.spec import VisionSpec

_MAX_IMAGES = 16  # in one prompt, where nothing else is asked for


@dataclass(frozen=True, slots=True)
class VisionModel:
    """How a model sees images, and which tokens stand for them."""

    spec: VisionSpec
    rules: ImageRules


def read_vision(config: dict[str, Any], directory: Path, text: DecoderSpec) -> VisionModel | None:
    """What a model directory says of images.

    Args:
        config: its parsed config.json.
        directory: where it lies; its processor's files are read, where they are there.
        text: the model that reads the images.

    Returns:
        None where the config has no part for images, or one of a family whose images are not
        taken.

    Raises:
        ModelLoadError: that part, or a processor's file, cannot be served; one line that says why.
            The text model can be.
    """
    family = FAMILIES.get(text.architecture)
    whole = ConfigReader(config)
    reader = whole.section("vision_config")
    if family is None or reader is None:
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
    if len(spec.deep_layers) > text.num_layers:
        raise whole.error("vision_config", "has more deep layers than the text model has layers")
    tokens = family.tokens(whole, directory)
    if max(token for token in tokens if token is not None) >= text.vocab_size:
        raise whole.error("vision_config", "needs tokens for images that lie beyond the vocabulary")
    scaling = family.scaling
    if spec.image_size is not None:
        scaling = FixedScaling(spec.image_size, crop=spec.class_token)
    processing = read_processing(directory, spec, scaling)
    return VisionModel(
        replace(spec, architecture=text.architecture, pixels=processing.pixels),
        ImageRules(
            token_id=tokens.token_id,
            row_end_id=tokens.row_end_id,
            end_id=tokens.end_id,
            cell=spec.cell_size,
            scaling=processing.scaling,
            max_images=_MAX_IMAGES,
        ),
    )

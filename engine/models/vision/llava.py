"""Readers of LLaVA's encoders (Liu et al. 2023)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.models.config_reader import ConfigReader
from engine.models.spec import DecoderSpec
from engine.models.vision.pixtral import pixtral
from engine.models.vision.shared import CLIP, llava_projector, read_fixed, siglip_encoder
from engine.models.vision.spec import VisionSpec
from engine.models.vision.tokens import ImageTokenIds, mistral_tokens


def llava(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """LLaVA, which has one of several encoders."""
    kind = _encoder_of(whole)
    if kind not in _ENCODERS:
        known = ", ".join(_ENCODERS)
        raise reader.error("model_type", f"is {kind[:80]!r}; known: {known}")
    # Features of all patches, or of those after the class token.
    chosen = "default" if kind == "clip_vision_model" else "full"
    whole.require("vision_feature_select_strategy", chosen)
    reader.ignore("is_composition")
    return _ENCODERS[kind](whole, reader, text)


def llava_tokens(whole: ConfigReader, directory: Path) -> ImageTokenIds:
    """LLaVA: a token for each patch."""
    if _encoder_of(whole) == "pixtral":
        return mistral_tokens(whole, directory)
    return ImageTokenIds(whole.non_negative("image_token_index", 32_000))


def _encoder_of(whole: ConfigReader) -> str:
    reader = whole.section("vision_config")
    return reader.text("model_type", "") if reader else ""


def _clip(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """CLIP's encoder (Radford et al. 2021)."""
    reader.ignore("projection_dim")
    merger, features = llava_projector(whole, text), _features(whole)
    base = read_fixed(
        *(whole, reader, text, merger, features),
        patch=32,
        norm_eps=1e-5,
        activation="quick_gelu",
    )
    return replace(base, pixels=CLIP, class_token=True, patch_norm=True)


def _siglip(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    return siglip_encoder(whole, reader, text, llava_projector(whole, text), _features(whole))


def _features(whole: ConfigReader) -> int:
    """Return the layer whose features LLaVA reads, possibly counted from the end."""
    return whole.integer("vision_feature_layer", -2)


_ENCODERS = {"clip_vision_model": _clip, "pixtral": pixtral, "siglip_vision_model": _siglip}

"""Readers of the encoders of LLaVA (Liu et al. 2023), LLaVA-NeXT and LLaVA-OneVision."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine.images.types import AnyresScaling, TileRewrite
from engine.models.config_reader import ConfigReader
from engine.models.spec import DecoderSpec
from engine.models.vision.pixtral import pixtral
from engine.models.vision.shared import (
    CLIP,
    Features,
    llava_projector,
    read_fixed,
    siglip_encoder,
)
from engine.models.vision.spec import PixelSpec, VisionSpec
from engine.models.vision.tokens import ImageTokenIds, TokenReader, mistral_tokens, token_names

_MAX_TILES = 256  # of a canvas
# Rows and columns of tiles, in the order of the published configs.
_NEXT_GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
_ONEVISION_GRIDS = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7))
_ASPECT = re.compile(r"anyres_max_(\d{1,3})")


def llava(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """LLaVA, which has one of several encoders."""
    return _read(whole, reader, text, _ENCODERS)


def llava_next(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """LLaVA-NeXT (LLaVA 1.6) and Granite Vision 3: a learned embedding ends rows of cells."""
    base = _read(whole, reader, text, _TILED_ENCODERS)
    return replace(base, pixels=CLIP, newline=True)


def llava_tokens(whole: ConfigReader, directory: Path) -> ImageTokenIds:
    """LLaVA: a token for each patch."""
    if _encoder_of(whole) == "pixtral":
        return mistral_tokens(whole, directory)
    return ImageTokenIds(whole.non_negative("image_token_index", 32_000))


def anyres_tokens(default: int) -> TokenReader:
    """LLaVA-NeXT: the view of the whole image, and then the canvas, under the same token."""

    def read(config: ConfigReader, directory: Path) -> ImageTokenIds:
        token_id = config.non_negative(
            "image_token_index", config.non_negative("image_token_id", default)
        )
        names = token_names(directory, (token_id,))
        if names is None:
            return ImageTokenIds(token_id)
        image = names[0]
        rewriting = TileRewrite(image, tile=image, whole=image, alone=image)
        return ImageTokenIds(token_id, rewriting=rewriting)

    return read


def llava_next_scaling(whole: ConfigReader, spec: VisionSpec) -> AnyresScaling:
    """Return the canvases of a config."""
    side = _side(spec)
    return AnyresScaling(side, _read_grids(whole, side, _NEXT_GRIDS))


def llava_onevision_scaling(whole: ConfigReader, spec: VisionSpec) -> AnyresScaling:
    """Return the canvases of a config, and the area beyond which their cells are shrunk."""
    side = _side(spec)
    aspect = whole.text("vision_aspect_ratio", "anyres_max_9")
    found = _ASPECT.fullmatch(aspect)
    if found is None or not int(found[1]):
        raise whole.error("vision_aspect_ratio", f"is {aspect[:80]!r}; known: 'anyres_max_N'")
    return AnyresScaling(
        side,
        _read_grids(whole, side, _ONEVISION_GRIDS),
        max_area=int(found[1]),
        border=border_of(spec.pixels),
    )


def read_canvases(reader: ConfigReader, scaling: AnyresScaling, pixels: PixelSpec) -> AnyresScaling:
    """Check that a processor's file describes the canvases of the model's config."""
    side = scaling.side
    square = {"height": side, "width": side}
    if not reader.has_value("size", {"shortest_edge": side}):
        reader.require("size", square)
    reader.ignore("do_center_crop")  # of what has this size already
    reader.require("crop_size", square)
    reader.ignore("do_pad")  # of several images to as many tiles
    reader.require(
        "image_grid_pinpoints", [[rows * side, columns * side] for rows, columns in scaling.grids]
    )
    if scaling.border is None:
        return scaling
    return AnyresScaling(side, scaling.grids, scaling.max_area, border_of(pixels))


def border_of(pixels: PixelSpec) -> tuple[int, int, int]:
    """Return the colour that completes an image to a square: about zero when normalised."""
    red, green, blue = (int(mean * 255) for mean in pixels.mean)
    return red, green, blue


def _read(
    whole: ConfigReader,
    reader: ConfigReader,
    text: DecoderSpec,
    encoders: dict[str, Callable[[ConfigReader, ConfigReader, DecoderSpec], VisionSpec]],
) -> VisionSpec:
    kind = _encoder_of(whole)
    if kind not in encoders:
        raise reader.error("model_type", f"is {kind[:80]!r}; known: {', '.join(encoders)}")
    # Features of all patches, or of those after the class token.
    chosen = "default" if kind == "clip_vision_model" else "full"
    whole.require("vision_feature_select_strategy", chosen)
    reader.ignore("is_composition")
    # Granite multiplies all that it is given, tokens' embeddings or not.
    return replace(encoders[kind](whole, reader, text), out_scale=text.embedding_scale)


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


def _features(whole: ConfigReader) -> Features:
    """Return the layers whose features are read, possibly counted from the end."""
    if not whole.is_list("vision_feature_layer"):
        return whole.integer("vision_feature_layer", -2)
    layers = whole.entries("vision_feature_layer")
    if not layers or not all(type(layer) is int for layer in layers):
        raise whole.error("vision_feature_layer", "must be a layer or a list of layers")
    return tuple(layers)


def _side(spec: VisionSpec) -> int:
    assert spec.image_size is not None, "the side of a tile"
    return spec.image_size


def _read_grids(
    whole: ConfigReader, side: int, usual: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    """Return the canvases as rows and columns of tiles."""
    sizes = whole.entries("image_grid_pinpoints")
    if not sizes:
        return usual
    grids: list[tuple[int, int]] = []
    for size in sizes:
        is_pair = isinstance(size, list) and [type(length) for length in size] == [int, int]
        if not is_pair or any(length < side or length % side for length in size):
            raise whole.error("image_grid_pinpoints", f"has {size!r:.80}: no tiles of {side}")
        grids.append((size[0] // side, size[1] // side))
    if max(map(math.prod, grids)) > _MAX_TILES:
        raise whole.error("image_grid_pinpoints", f"has canvases of more than {_MAX_TILES} tiles")
    return tuple(grids)


_ENCODERS = {"clip_vision_model": _clip, "pixtral": pixtral, "siglip_vision_model": _siglip}
_TILED_ENCODERS = {"clip_vision_model": _clip, "siglip_vision_model": _siglip}

"""Reader of Llama 4's encoder (Meta 2025)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.images.types import CornerScaling, TileRewrite
from engine.models.config_reader import ConfigReader
from engine.models.spec import DecoderSpec
from engine.models.vision.shared import (
    HALF,
    MAX_IMAGE,
    MAX_LAYERS,
    MAX_MERGE,
    MAX_SIDE,
    read_num_heads,
    read_rope,
)
from engine.models.vision.spec import AdapterSpec, VisionNorm, VisionSpec
from engine.models.vision.tiled import with_cells
from engine.models.vision.tokens import ImageTokenIds, require_names, token_names


def llama4(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """Llama 4 Scout and Maverick."""
    reader.require("num_channels", 3)
    reader.require("hidden_act", "gelu")
    reader.require("vision_feature_layer", -1)
    reader.require("vision_feature_select_strategy", "default")
    for key in ("norm_eps", "multi_modal_projector_bias", "projector_dropout"):
        reader.ignore(key)  # of no part
    hidden = reader.count("hidden_size", 768)
    heads = read_num_heads(reader, "num_attention_heads", hidden)
    patch = reader.count("patch_size", 14, limit=MAX_SIDE)
    image_size = reader.count("image_size", 448, limit=MAX_IMAGE)
    if image_size < patch:
        raise reader.error("image_size", f"of {image_size} is less than a patch of {patch}")
    inner = reader.count("projector_input_dim", 4096)
    reader.require("projector_output_dim", inner)
    reader.require("vision_output_dim", inner)
    ratio = reader.number("pixel_shuffle_ratio", 0.5)
    merge = round(1 / ratio) if ratio >= 1 / MAX_MERGE else 0
    if merge == 0 or abs(merge * ratio - 1) > 1e-6:
        raise reader.error("pixel_shuffle_ratio", f"is {ratio:g}, which makes no whole patches")
    rope = read_rope(reader, "num_attention_heads", hidden // heads)
    spec = VisionSpec(
        hidden_size=hidden,
        intermediate_size=reader.count("intermediate_size", 5632),
        num_heads=heads,
        num_layers=reader.count("num_hidden_layers", 34, limit=MAX_LAYERS),
        patch_size=patch,
        merge_size=1,
        out_size=text.hidden_size,
        norm=VisionNorm("layer", 1e-5),
        activation="gelu",
        merger=AdapterSpec(inner),
        pixels=HALF,
        flat_patches=True,
        patch_norm=True,
        final_norm=True,
        rope=replace(rope, interleaved=True, columns_first=True, first=1),
        image_size=image_size,
        class_token=True,
        class_last=True,
    )
    # The adapter's inputs, a cell's patches, are declared as wide as the layers' MLPs.
    if spec.intermediate_size != hidden * merge**2:
        raise reader.error("intermediate_size", f"is not that of {merge} x {merge} patches")
    return with_cells(reader, "pixel_shuffle_ratio", spec, merge)


def llama4_scaling(side: int) -> CornerScaling:
    """Return the published limits."""
    return CornerScaling(side, 16)


def llama4_tokens(config: ConfigReader, directory: Path) -> ImageTokenIds:
    """Separators between tiles and behind their rows; templates write a token of another name."""
    token_id = config.non_negative(
        "image_token_index", config.non_negative("image_token_id", 200_092)
    )
    names = token_names(directory, (token_id,))
    if names is None:
        return ImageTokenIds(token_id)
    shown, begin, end = "<|image|>", "<|image_start|>", "<|image_end|>"
    between, row_end = "<|tile_x_separator|>", "<|tile_y_separator|>"
    require_names(directory, (shown, begin, end, between, row_end))
    tile = names[0]
    rewriting = TileRewrite(
        *(shown, tile),
        whole=shown + tile,
        alone=shown + tile,
        between=between,
        row_end=row_end,
        begin=begin,
        end=end,
    )
    return ImageTokenIds(token_id, rewriting=rewriting)

"""Readers of MoonViT, the encoder of Kimi K2.5 and later (Kimi Team 2025)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.images.types import PaddedScaling
from engine.models.config_reader import ConfigReader
from engine.models.spec import DecoderSpec
from engine.models.vision.shared import (
    HALF,
    MAX_LAYERS,
    MAX_MERGE,
    MAX_SIDE,
    read_activation,
    read_num_heads,
    read_rope,
)
from engine.models.vision.spec import MergerSpec, VisionNorm, VisionSpec
from engine.models.vision.tokens import ImageTokenIds

_EPS = 1e-5  # of the layers' norms; not in any config
# Published names of keys, and Hugging Face's.
_SIZES = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
}
_DEFAULTS = {
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16},
    **{"num_hidden_layers": 27, "pos_emb_height": 64, "pos_emb_width": 64},
}
# The published processor's settings of videos.
_VIDEO = (
    *("in_patch_limit_each_frame", "in_patch_limit_video", "max_num_frames_each_video"),
    *("sample_fps", "temporal_merge_kernel_size", "timestamp_mode", "config_type"),
)


def kimi_k25(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """Kimi K2.5 and later: bicubically interpolated positions, and a rope of adjacent pairs."""
    reader.set_defaults(
        {new: reader.non_negative(old) for old, new in _SIZES.items() if old in reader}
    )
    for key in ("_attn_implementation", "pos_emb_time", "video_attn_type"):
        reader.ignore(key)
    reader.require("merge_type", "sd2_tpool")
    reader.require("mm_projector_type", "patchmerger")
    reader.require("pos_emb_type", "divided_fixed")
    reader.require("text_hidden_size", text.hidden_size)
    reader.set_defaults(_DEFAULTS)
    hidden = reader.count("hidden_size")
    reader.require("mm_hidden_size", hidden)
    whole.require("projection_hidden_size", hidden)
    heads = read_num_heads(reader, "num_attention_heads", hidden)
    rows, columns = reader.count("pos_emb_height"), reader.count("pos_emb_width")
    if rows != columns:
        raise reader.error("pos_emb_height", f"of {rows} differs from the width of {columns}")
    merge, other = (2, 2)
    if "merge_kernel_size" in reader:
        merge, other = reader.int_pair("merge_kernel_size")
    if merge != other or merge >= MAX_MERGE:
        raise reader.error("merge_kernel_size", f"must be a square below {MAX_MERGE}")
    eps = reader.number("projector_ln_eps", whole.number("projection_layer_norm_eps", 1e-5))
    return VisionSpec(
        hidden_size=hidden,
        intermediate_size=reader.count("intermediate_size"),
        num_heads=heads,
        num_layers=reader.count("num_hidden_layers", limit=MAX_LAYERS),
        patch_size=reader.count("patch_size", 14, limit=MAX_SIDE),
        merge_size=merge,
        out_size=text.hidden_size,
        norm=VisionNorm("layer", _EPS),
        activation=read_activation(reader, "hidden_act", "gelu_pytorch_tanh"),
        merger=MergerSpec(
            VisionNorm("layer", eps),
            hidden * merge**2,
            read_activation(reader, "projector_hidden_act", "gelu"),
        ),
        pixels=HALF,
        patch_bias=True,
        rope=replace(read_rope(reader, "num_attention_heads", hidden // heads), interleaved=True),
        position_grid_size=rows,
        sampled_positions="bicubic",
        squared_positions=True,
        final_norm=True,
    )


def kimi_tokens(config: ConfigReader, directory: Path) -> ImageTokenIds:
    """One token per cell; templates write those around an image."""
    newer = config.non_negative("image_token_id", 163_605)
    return ImageTokenIds(config.non_negative("media_placeholder_token_id", newer))


def kimi_scaling(spec: VisionSpec) -> PaddedScaling:
    """Return the published limits."""
    return padded_scaling(spec.patch_size, spec.merge_size, 16_384, 512)


def padded_scaling(patch: int, merge: int, max_patches: int, max_side: int) -> PaddedScaling:
    """Return a scaling whose ``max_cells`` bounds what these limits allow.

    Patches are counted in whole ones, and cells are completed, so there may be one more patch and
    one more cell along each side.
    """
    around = max_side + -(-max_patches // max_side) + 1
    max_cells = -(-(max_patches + around) // merge**2) + -(-around // merge) + 1
    return PaddedScaling(patch, max_patches, max_side, max_cells)


def read_padding(reader: ConfigReader, spec: VisionSpec, scaling: PaddedScaling) -> PaddedScaling:
    """Read the limits of a processor's file."""
    size = reader.section("size")
    side = scaling.max_side
    if size is not None:
        side = size.count("max_height", side)
        size.require("max_width", side)
        size.finish()
    most = reader.count("max_patches", scaling.max_patches)
    return padded_scaling(spec.patch_size, spec.merge_size, most, side)


def as_hugging_face(reader: ConfigReader) -> ConfigReader:
    """Return the published processor's settings with Hugging Face's keys; others as they are."""
    section = reader.section("media_proc_cfg")
    if section is None:
        return reader
    for key in ("auto_map", "processor_class", "image_processor_type"):
        reader.ignore(key)
    reader.finish()
    for key in _VIDEO:
        section.ignore(key)
    section.refuse("fixed_output_tokens", "is set, which is not supported")
    side = section.count("patch_limit_on_one_side", 512)
    section.set_defaults(
        {
            "size": {"max_height": side, "max_width": side},
            "max_patches": section.count("in_patch_limit", 16_384),
            "merge_size": section.count("merge_kernel_size", 2),
        }
    )
    return section

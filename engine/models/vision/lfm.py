"""Readers of the encoders of LFM2-VL, SigLIP 2 (Tschannen et al. 2025), and of LFM3-VL."""

from __future__ import annotations

import math
from dataclasses import replace

from engine.images.types import SplitScaling
from engine.models.config_reader import ConfigReader
from engine.models.spec import DecoderSpec
from engine.models.vision.shared import (
    CLIP,
    HALF,
    MAX_IMAGE,
    MAX_LAYERS,
    MAX_MERGE,
    MAX_SIDE,
    read_activation,
    read_num_heads,
    read_rope,
)
from engine.models.vision.spec import MergerSpec, VisionNorm, VisionSpec

_PROJECTOR_NORM = VisionNorm("layer", 1e-5)
_MAX_TILES = 1024


def lfm2_vl(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """LFM2-VL 450M to 3B."""
    reader.require("model_type", "siglip2_vision_model")
    reader.require("num_channels", 3)
    reader.ignore("vision_use_head")
    whole.require("vision_feature_layer", -1)
    hidden = reader.count("hidden_size", 768)
    positions = reader.count("num_patches", 256)
    side = math.isqrt(positions)
    if side**2 != positions:
        raise reader.error("num_patches", f"of {positions} make no square")
    return VisionSpec(
        hidden_size=hidden,
        intermediate_size=reader.count("intermediate_size", 3072),
        num_heads=read_num_heads(reader, "num_attention_heads", hidden, 12),
        num_layers=reader.count("num_hidden_layers", 12, limit=MAX_LAYERS),
        patch_size=reader.count("patch_size", 16, limit=MAX_SIDE),
        merge_size=whole.count("downsample_factor", 2, limit=MAX_MERGE),
        out_size=text.hidden_size,
        norm=VisionNorm("layer", reader.number("layer_norm_eps", 1e-6)),
        activation=read_activation(reader, "hidden_act", "gelu_pytorch_tanh"),
        merger=MergerSpec(
            _PROJECTOR_NORM if whole.flag("projector_use_layernorm", True) else None,
            whole.count("projector_hidden_size", 2560),
            read_activation(whole, "projector_hidden_act", "gelu"),
            bias=whole.flag("projector_bias", True),
            norm_of_cells=True,
        ),
        pixels=HALF,
        patch_bias=True,
        channels_last=True,
        position_grid_size=side,
        sampled_positions="averaged",
        final_norm=True,
    )


def lfm3_vl(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """LFM3-VL: gated convolutions in most layers, attention with rope in the others."""
    reader.require("in_channels", 3)
    hidden = reader.count("hidden_size", 1024)
    heads = read_num_heads(reader, "num_attention_heads", hidden, 16)
    num_kv_heads = reader.count("num_key_value_heads", 8)
    if heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"must divide the {heads} attention heads")
    num_layers = reader.count("num_hidden_layers", 14, limit=MAX_LAYERS)
    size = reader.count("conv_kernel_size", 3, limit=MAX_MERGE)
    if size % 2 == 0:
        raise reader.error("conv_kernel_size", f"of {size} has no middle")
    norm = VisionNorm("rms", reader.number("norm_eps", 1e-5))
    return VisionSpec(
        hidden_size=hidden,
        intermediate_size=reader.count("intermediate_size", 2560),
        num_heads=heads,
        num_layers=num_layers,
        patch_size=reader.count("patch_size", 16, limit=MAX_SIDE),
        merge_size=reader.count("spatial_merge_size", 2, limit=MAX_MERGE),
        out_size=text.hidden_size,
        norm=norm,
        activation="silu",
        merger=MergerSpec(
            VisionNorm("layer", 1e-6),
            whole.count("projector_hidden_size", 4096),
            read_activation(whole, "projector_hidden_act", "gelu"),
            bias=whole.flag("projector_bias", True),
        ),
        pixels=CLIP,
        num_kv_heads=num_kv_heads,
        gated=True,
        bias=False,
        qk_norm=replace(norm, by_head=True),
        mlp_bias=False,
        flat_patches=True,
        num_frames=reader.count("temporal_patch_size", 2, limit=MAX_MERGE),
        patch_norm=True,
        rope=read_rope(reader, "num_attention_heads", hidden // heads, 1_000_000.0),
        conv_layers=_conv_layers(reader, num_layers),
        conv_size=size,
    )


def _conv_layers(reader: ConfigReader, count: int) -> frozenset[int]:
    kinds = reader.list_of_length("layer_types", count) or [
        "conv" if i < 2 or i % 2 else "full_attention" for i in range(count)
    ]
    for kind in kinds:
        if kind not in ("conv", "full_attention"):
            raise reader.error("layer_types", f"has {kind!r:.80}, which is not supported")
    return frozenset(i for i, kind in enumerate(kinds) if kind == "conv")


def lfm2_scaling(spec: VisionSpec) -> SplitScaling:
    """Return the published limits."""
    area = spec.cell_size**2
    return SplitScaling(512, 2, 10, 64 * area, 256 * area)


def read_split(reader: ConfigReader, spec: VisionSpec, scaling: SplitScaling) -> SplitScaling:
    """Read the limits of a processor's file."""
    for key in ("size", "return_row_col_info", "max_num_patches"):
        reader.ignore(key)  # the last one follows from the others
    reader.require("use_thumbnail", True)
    reader.require("encoder_patch_size", spec.patch_size)
    reader.require("downsample_factor", spec.merge_size)
    area = spec.cell_size**2
    side = reader.count("tile_size", scaling.side, limit=MAX_IMAGE)
    if side % spec.cell_size:
        raise reader.error("tile_size", f"of {side} has no whole cells of {spec.cell_size} pixels")
    least = reader.count("min_image_tokens", scaling.min_pixels // area)
    most = reader.count("max_image_tokens", scaling.max_pixels // area)
    if least > most:
        raise reader.error("max_image_tokens", f"of {most} is less than the minimum of {least}")
    min_cut = reader.count("min_tiles", scaling.min_cut)
    max_cut = reader.count("max_tiles", scaling.max_cut, limit=_MAX_TILES)
    if not reader.flag("do_image_splitting", True):
        min_cut = max_cut = 1
    if min_cut > max_cut:
        raise reader.error("max_tiles", f"of {max_cut} is less than the {min_cut} of min_tiles")
    tolerance = reader.number("max_pixels_tolerance", scaling.tolerance)
    return SplitScaling(side, min_cut, max_cut, least * area, most * area, tolerance)

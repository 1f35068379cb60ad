"""Readers of the encoders of GLM-4.1V (GLM-V Team 2025) and its successors, and of GLM-OCR."""

from __future__ import annotations

from dataclasses import replace

from engine.models.config_reader import ConfigReader
from engine.models.spec import DecoderSpec
from engine.models.vision.shared import (
    CLIP,
    MAX_IMAGE,
    MAX_LAYERS,
    MAX_MERGE,
    MAX_SIDE,
    read_activation,
    read_num_heads,
    read_rope,
)
from engine.models.vision.spec import GatedMergerSpec, VisionNorm, VisionSpec


def glm4v(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """GLM-4.1V, 4.5V and 4.6V: learned positions, bicubically interpolated.

    The encoder's MLPs are as wide as the text model, and ``intermediate_size`` is the merger's.
    """
    reader.require("attention_bias", False)
    out = reader.count("out_hidden_size", 4096)
    return _glm(reader, hidden=1536, heads=12, out=out, inner=out, is_ocr=False)


def glm_ocr(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """GLM-OCR: norms of queries and keys, no learned positions."""
    out = reader.count("out_hidden_size", 1536)
    inner = reader.count("intermediate_size", 4096)
    return _glm(reader, hidden=1024, heads=16, out=out, inner=inner, is_ocr=True)


def _glm(
    reader: ConfigReader, *, hidden: int, heads: int, out: int, inner: int, is_ocr: bool
) -> VisionSpec:
    """Read what both have in common; ``hidden`` and ``heads`` are defaults."""
    reader.require("in_channels", 3)
    hidden = reader.count("hidden_size", hidden)
    heads = read_num_heads(reader, "num_heads", hidden, heads)
    norm = VisionNorm("rms", reader.number("rms_norm_eps", 1e-5))
    side = reader.count("patch_size", 14, limit=MAX_SIDE)
    image_size = reader.count("image_size", 336, limit=MAX_IMAGE)
    if image_size < side:
        raise reader.error("image_size", f"of {image_size} is less than a patch of {side}")
    activation = read_activation(reader, "hidden_act", "silu")
    merger_size = 3 * out if is_ocr else reader.count("intermediate_size", 13_696)
    has_bias = is_ocr and reader.flag("attention_bias", True)
    return VisionSpec(
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_layers=reader.count("depth", 24, limit=MAX_LAYERS),
        patch_size=side,
        merge_size=reader.count("spatial_merge_size", 2, limit=MAX_MERGE),
        out_size=out,
        norm=norm,
        activation=activation,
        merger=GatedMergerSpec(merger_size, activation),
        pixels=CLIP,
        gated=True,
        bias=has_bias,
        mlp_bias=has_bias,
        patch_bias=True,
        num_frames=reader.count("temporal_patch_size", 2, limit=MAX_MERGE),
        rope=read_rope(reader, "num_heads", hidden // heads),
        qk_norm=replace(norm, by_head=True) if is_ocr else None,
        patch_norm=not is_ocr,
        norm_before_positions=not is_ocr,
        position_grid_size=0 if is_ocr else image_size // side,
        sampled_positions=None if is_ocr else "bicubic",
        final_norm=True,
    )

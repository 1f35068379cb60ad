"""Readers of Pixtral's encoder (Agrawal et al. 2024), as several models have it."""

from __future__ import annotations

from dataclasses import replace

from engine.models.config_reader import ConfigReader
from engine.models.spec import DecoderSpec
from engine.models.vision.shared import (
    CLIP,
    MAX_LAYERS,
    MAX_MERGE,
    MAX_SIDE,
    llava_projector,
    read_activation,
    read_num_heads,
    read_rope,
)
from engine.models.vision.spec import MergerSpec, VisionNorm, VisionSpec


def mistral3(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """Mistral Small 3.1 and later, Ministral 3: Pixtral's encoder, several patches per cell."""
    return replace(
        pixtral(whole, reader, text),
        merge_size=whole.count("spatial_merge_size", 2, limit=MAX_MERGE),
        merger=MergerSpec(
            VisionNorm("rms", text.norm.eps),
            text.hidden_size,
            read_activation(whole, "projector_hidden_act", "gelu"),
            bias=whole.flag("multimodal_projector_bias"),
            joined=True,
        ),
    )


def pixtral(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """Pixtral 12B: one patch per cell."""
    reader.require("num_channels", 3)
    reader.ignore("image_size")  # longest side in training
    reader.ignore("vocab_size")
    whole.require("vision_feature_layer", -1)
    hidden = reader.count("hidden_size", 1024)
    heads = read_num_heads(reader, "num_attention_heads", hidden)
    reader.require("head_dim", hidden // heads)
    return VisionSpec(
        hidden_size=hidden,
        intermediate_size=reader.count("intermediate_size", 4096),
        num_heads=heads,
        num_layers=reader.count("num_hidden_layers", 24, limit=MAX_LAYERS),
        patch_size=reader.count("patch_size", 16, limit=MAX_SIDE),
        merge_size=1,
        out_size=text.hidden_size,
        norm=VisionNorm("rms", 1e-5),
        activation=read_activation(reader, "hidden_act", "gelu"),
        merger=llava_projector(whole, text),
        pixels=CLIP,
        gated=True,
        bias=False,
        mlp_bias=False,
        patch_norm=True,
        rope=read_rope(reader, "num_attention_heads", hidden // heads, staggered=True),
    )

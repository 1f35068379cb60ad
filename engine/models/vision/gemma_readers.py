"""Readers of the encoders of Gemma 3 and Gemma 4."""

from __future__ import annotations

import math
from dataclasses import replace

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
    siglip_encoder,
)
from engine.models.vision.spec import PixelSpec, PoolSpec, VisionNorm, VisionSpec

_PLAIN = PixelSpec((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
_LAYER_NORM = VisionNorm("layer", 1e-5)


def gemma3(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """Gemma 3 (Gemma Team 2025): SigLIP's encoder (Zhai et al. 2023).

    Its patches are averaged to the same number of tokens for each image.
    """
    reader.require("model_type", "siglip_vision_model")
    eps = reader.number("layer_norm_eps", 1e-6)
    pool = PoolSpec(eps, weighted=True, inputs_first=True)
    base = siglip_encoder(whole, reader, text, pool, -1)
    assert base.image_size is not None
    side = base.image_size // base.patch_size
    count = whole.count("mm_tokens_per_image", 256)
    tokens = math.isqrt(count)
    if tokens**2 != count or side % tokens:
        problem = f"of {count} makes no square of whole patches, {side} along a side"
        raise whole.error("mm_tokens_per_image", problem)
    return replace(base, merge_size=side // tokens, final_norm=True)


def gemma4(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """Gemma 4: its own encoder, for images of any shape."""
    reader.require("attention_bias", False)
    for key in ("max_position_embeddings", "global_head_dim", "default_output_length"):
        reader.ignore(key)  # unbounded rope, uniform layers, tokens given elsewhere
    hidden = reader.count("hidden_size", 768)
    heads = read_num_heads(reader, "num_attention_heads", hidden, 12)
    reader.require("num_key_value_heads", heads)
    reader.require("head_dim", hidden // heads)
    eps = reader.number("rms_norm_eps", 1e-6)
    return VisionSpec(
        hidden_size=hidden,
        intermediate_size=reader.count("intermediate_size", 3072),
        num_heads=heads,
        num_layers=reader.count("num_hidden_layers", 16, limit=MAX_LAYERS),
        patch_size=reader.count("patch_size", 16, limit=MAX_SIDE),
        merge_size=reader.count("pooling_kernel_size", 3, limit=MAX_MERGE),
        out_size=text.hidden_size,
        norm=VisionNorm("rms", eps),
        activation=read_activation(reader, "hidden_activation", "gelu_pytorch_tanh"),
        merger=PoolSpec(eps, scale=hidden**0.5, standardised=reader.flag("standardize")),
        pixels=HALF,
        gated=True,
        bias=False,
        mlp_bias=False,
        channels_last=True,
        sandwich=True,
        clipped=reader.flag("use_clipped_linears"),
        rope=replace(
            read_rope(reader, "num_attention_heads", hidden // heads, 100.0), split_halves=True
        ),
        num_axis_positions=reader.count("position_embedding_size", 10_240),
    )


def gemma4_unified(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """Gemma 4 12B, which has no encoder: a patch of each cell is projected by itself.

    layer norm ─► projection ─► layer norm ─► positions of two axes ─► layer norm ─► RMS norm
    ─► projection
    """
    side = reader.count("patch_size", 16, limit=MAX_SIDE)
    cell = side * reader.count("pooling_kernel_size", 3, limit=MAX_MERGE)
    reader.require("model_patch_size", cell)
    hidden = reader.count("mm_embed_dim", 3840)
    reader.require("output_proj_dims", hidden)
    return VisionSpec(
        hidden_size=hidden,
        intermediate_size=hidden,
        num_heads=1,
        num_layers=0,
        patch_size=cell,
        merge_size=1,
        out_size=text.hidden_size,
        norm=_LAYER_NORM,
        activation="gelu",
        merger=PoolSpec(reader.number("rms_norm_eps", 1e-6)),
        pixels=_PLAIN,
        pixel_norm=_LAYER_NORM,
        patch_bias=True,
        channels_last=True,
        patch_norm=True,
        norm_before_positions=True,
        final_norm=True,
        num_axis_positions=reader.count("mm_posemb_size", 1120),
        paired_positions=True,
        processor_patch=side,
    )

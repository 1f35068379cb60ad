"""Reader of PaddleOCR-VL's encoder (Cui et al. 2025): SigLIP with a rope."""

from __future__ import annotations

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
from engine.models.vision.spec import MergerSpec, VisionNorm, VisionSpec

_PROJECTOR_NORM = VisionNorm("layer", 1e-5)


def paddleocr_vl(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """PaddleOCR-VL."""
    reader.require("num_channels", 3)
    reader.ignore("auto_map")  # transformers has the code
    for key in ("temporal_patch_size", "tokens_per_second"):
        reader.ignore(key)  # of videos
    hidden = reader.count("hidden_size", 1152)
    heads = read_num_heads(reader, "num_attention_heads", hidden)
    side = reader.count("patch_size", 14, limit=MAX_SIDE)
    image_size = reader.count("image_size", 384, limit=MAX_IMAGE)
    if image_size < side:
        raise reader.error("image_size", f"of {image_size} is less than a patch of {side}")
    merge = reader.count("spatial_merge_size", 2, limit=MAX_MERGE)
    return VisionSpec(
        hidden_size=hidden,
        intermediate_size=reader.count("intermediate_size", 4304),
        num_heads=heads,
        num_layers=reader.count("num_hidden_layers", 27, limit=MAX_LAYERS),
        patch_size=side,
        merge_size=merge,
        out_size=text.hidden_size,
        norm=VisionNorm("layer", reader.number("layer_norm_eps", 1e-6)),
        activation=read_activation(reader, "hidden_act", "gelu_pytorch_tanh"),
        merger=MergerSpec(_PROJECTOR_NORM, hidden * merge**2),
        pixels=CLIP,
        patch_bias=True,
        rope=read_rope(reader, "num_attention_heads", hidden // heads),
        position_grid_size=image_size // side,
        sampled_positions="bilinear",
        final_norm=True,
    )

"""Readers of Cohere's encoders, SigLIP (Zhai et al. 2023) with a gated projector of cells."""

from __future__ import annotations

from dataclasses import replace

from engine.models.config_reader import ConfigReader
from engine.models.spec import DecoderSpec
from engine.models.vision.shared import CLIP, MAX_MERGE, siglip_encoder
from engine.models.vision.spec import MergerSpec, VisionNorm, VisionSpec
from engine.models.vision.tiled import with_cells

# Values that configs leave out.
_DEFAULTS = {
    **{"hidden_size": 1152, "intermediate_size": 3072, "image_size": 512},
    **{"num_hidden_layers": 27, "num_attention_heads": 12},
}


def cohere2_vision(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """Command A Vision."""
    reader.require("model_type", "siglip_vision_model")
    reader.set_defaults(_DEFAULTS)
    inner = whole.count("alignment_intermediate_size", 36_864)
    merger = MergerSpec(None, _half(whole, inner), "silu", gated=True)
    base = siglip_encoder(whole, reader, text, merger, -1)
    base = replace(base, pixels=CLIP, final_norm=True)
    spec = _with_cells(whole, base)
    assert spec.image_size is not None
    # The model's processor takes this for the tokens along a side of a tile.
    if spec.patch_size * spec.cell_size != spec.image_size:
        cells = spec.image_size // spec.cell_size
        raise reader.error("patch_size", f"is {spec.patch_size}; a tile has {cells} cells a side")
    return spec


def aya_vision(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """Aya Vision (Dash et al. 2025)."""
    reader.require("model_type", "siglip_vision_model")
    whole.require("vision_feature_select_strategy", "full")
    inner = whole.count("alignment_intermediate_size", text.hidden_size)
    norm = VisionNorm("layer", whole.number("adapter_layer_norm_eps", 1e-6))
    merger = MergerSpec(norm, _half(whole, inner), "silu", norm_of_cells=True, gated=True)
    features = whole.integer("vision_feature_layer", -1)
    return _with_cells(whole, siglip_encoder(whole, reader, text, merger, features))


def _half(whole: ConfigReader, size: int) -> int:
    if size % 2:
        raise whole.error("alignment_intermediate_size", f"of {size} has no halves")
    return size // 2


def _with_cells(whole: ConfigReader, spec: VisionSpec) -> VisionSpec:
    key = "downsample_factor"
    return with_cells(whole, key, spec, whole.count(key, 2, limit=MAX_MERGE))

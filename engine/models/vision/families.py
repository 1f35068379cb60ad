"""Readers of vision encoders: a config's vision section becomes a VisionSpec, or is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from engine.images.types import (
    AnyresScaling,
    AreaScaling,
    BudgetScaling,
    CornerScaling,
    EdgeScaling,
    GridScaling,
    Resampling,
    Scaling,
    TileScaling,
)
from engine.models.config_reader import ConfigReader
from engine.models.spec import DecoderSpec
from engine.models.vision import video as videos
from engine.models.vision.cohere import aya_vision, cohere2_vision
from engine.models.vision.gemma_readers import gemma3, gemma4, gemma4_unified
from engine.models.vision.glm import glm4v, glm_ocr
from engine.models.vision.kimi import kimi_k25, kimi_scaling, kimi_tokens
from engine.models.vision.lfm import lfm2_scaling, lfm2_vl, lfm3_vl
from engine.models.vision.llama import llama4, llama4_scaling, llama4_tokens
from engine.models.vision.llava import (
    anyres_tokens,
    llava,
    llava_next,
    llava_next_scaling,
    llava_onevision_scaling,
    llava_tokens,
)
from engine.models.vision.minicpm import minicpm_scaling, minicpm_tokens, minicpmv4_6
from engine.models.vision.paddle import paddleocr_vl
from engine.models.vision.pixtral import mistral3
from engine.models.vision.shared import (
    CLIP,
    HALF,
    MAX_LAYERS,
    MAX_MERGE,
    MAX_SIDE,
    read_activation,
    read_num_heads,
    read_rope,
)
from engine.models.vision.spec import MergerSpec, VisionNorm, VisionSpec
from engine.models.vision.tiled import idefics3, internvl
from engine.models.vision.tokens import (
    TokenReader,
    aya_tokens,
    cohere_tokens,
    gemma3_tokens,
    gemma4_tokens,
    idefics3_tokens,
    internvl_tokens,
    lfm2_tokens,
    mistral_tokens,
    qwen_tokens,
)
from engine.models.vision.video import RulesReader

_QWEN_EPS = 1e-6  # of all norms; not in any config


class VisionFamily(NamedTuple):
    """How the encoder of a Hugging Face model_type is read."""

    # Reads the whole config, its vision section (to the end), and the text model's spec.
    read: Callable[[ConfigReader, ConfigReader, DecoderSpec], VisionSpec]
    tokens: TokenReader
    # The published limits, if no file beside config.json has them, or how they follow from the
    # encoder's cells. None: the encoder's only size.
    scaling: Scaling | Callable[[VisionSpec], Scaling] | None
    resampling: Resampling = "bicubic"
    # The published limits of models that cut images into tiles, by the side of a tile.
    tiling: Callable[[int], TileScaling | GridScaling | CornerScaling] | None = None
    # The limits of models that see images on canvases of tiles, which are in the whole config.
    canvases: Callable[[ConfigReader, VisionSpec], AnyresScaling] | None = None
    video: RulesReader | None = None  # None: its videos are not read
    section: str = ""  # of config.json that describes it; empty: the whole


def qwen2_vl(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """Qwen2-VL (Wang et al. 2024)."""
    hidden = reader.count("embed_dim", 1280)
    return _qwen(
        reader,
        hidden=hidden,
        inner=hidden * reader.count("mlp_ratio", 4),
        out=reader.count("hidden_size", 3584),
        norm=VisionNorm("layer", _QWEN_EPS),
        activation="quick_gelu",
    )


def qwen2_5_vl(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """Qwen2.5-VL (Bai et al. 2025): windows, RMS norms, a gated MLP."""
    reader.ignore("tokens_per_second")  # video only
    base = _qwen(
        reader,
        hidden=reader.count("hidden_size", 3584),
        inner=reader.count("intermediate_size", 3420),
        out=reader.count("out_hidden_size", 3584),
        norm=VisionNorm("rms", _QWEN_EPS),
        activation="silu",
    )
    window = reader.count("window_size", 112) // base.cell_size
    if window == 0:
        raise reader.error("window_size", f"is less than a cell of {base.cell_size} pixels")
    return replace(
        base,
        gated=True,
        window=window,
        full_attention_layers=frozenset(reader.layers("fullatt_block_indexes", (7, 15, 23, 31))),
    )


def exaone4_5(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """EXAONE 4.5: Qwen2.5-VL's encoder, in which heads share keys and values."""
    num_kv_heads = reader.count("num_key_value_heads", 8)
    base = qwen2_5_vl(whole, reader, text)
    if base.num_heads % num_kv_heads:
        problem = f"must divide the {base.num_heads} attention heads"
        raise reader.error("num_key_value_heads", problem)
    return replace(base, num_kv_heads=num_kv_heads)


def qwen3_vl(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """Qwen3-VL (Qwen Team 2025): learned positions in addition, and features of inner layers."""
    base = _qwen3(reader)
    deep = reader.layers("deepstack_visual_indexes", (8, 16, 24))
    if any(layer >= base.num_layers for layer in deep) or len(set(deep)) < len(deep):
        raise reader.error("deepstack_visual_indexes", "must be some of the layers, each once")
    return replace(base, deepstack_layers=deep)


def qwen3_5(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """Qwen3.5: as Qwen3-VL, but only the last layer's features."""
    reader.refuse("deepstack_visual_indexes", "is set, which is not supported in this family")
    return _qwen3(reader)


def _qwen(
    reader: ConfigReader,
    *,
    hidden: int,
    inner: int,
    out: int,
    norm: VisionNorm,
    activation: str,
    num_layers: int = 32,
    patch: int = 14,
) -> VisionSpec:
    """Read what Qwen's encoders have in common; all values but the sizes are defaults."""
    reader.require("in_channels", 3)
    reader.require("in_chans", 3)
    side = reader.count("patch_size", patch, limit=MAX_SIDE)
    reader.require("spatial_patch_size", side)
    merge = reader.count("spatial_merge_size", 2, limit=MAX_MERGE)
    return VisionSpec(
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=(heads := read_num_heads(reader, "num_heads", hidden)),
        num_layers=reader.count("depth", num_layers, limit=MAX_LAYERS),
        patch_size=side,
        merge_size=merge,
        out_size=out,
        norm=norm,
        activation=read_activation(reader, "hidden_act", activation),
        merger=MergerSpec(norm, hidden * merge**2),
        pixels=CLIP,
        num_frames=reader.count("temporal_patch_size", 2, limit=MAX_MERGE),
        rope=read_rope(reader, "num_heads", hidden // heads),
    )


def _qwen3(reader: ConfigReader) -> VisionSpec:
    base = _qwen(
        reader,
        hidden=reader.count("hidden_size", 1152),
        inner=reader.count("intermediate_size", 4304),
        out=reader.count("out_hidden_size", 3584),
        norm=VisionNorm("layer", _QWEN_EPS),
        activation="gelu_pytorch_tanh",
        num_layers=27,
        patch=16,
    )
    positions = reader.count("num_position_embeddings", 2304)
    side = math.isqrt(positions)
    if side**2 != positions:
        raise reader.error("num_position_embeddings", f"of {positions} make no square")
    return replace(base, patch_bias=True, position_grid_size=side, pixels=HALF)


_QWEN2_SCALING = AreaScaling(3136, 12_845_056)
_QWEN3_SCALING = AreaScaling(65_536, 16_777_216)
_THINKER = "thinker_config"
_QWEN2_5_OMNI = VisionFamily(qwen2_5_vl, qwen_tokens(151_655), _QWEN2_SCALING)
_QWEN3_OMNI = VisionFamily(qwen3_vl, qwen_tokens(151_655), _QWEN2_SCALING)
_QWEN3_VL = VisionFamily(
    qwen3_vl, qwen_tokens(151_655), _QWEN3_SCALING, video=videos.qwen3_vl(151_656)
)
_QWEN3_5 = VisionFamily(
    qwen3_5, qwen_tokens(248_056), _QWEN3_SCALING, video=videos.qwen3_vl(248_057)
)
# Two frames are counted, though an image is one.
_GLM_SCALING = AreaScaling(12_544, 11_760_000, num_frames=2, growing="cut")
_GLM4V = VisionFamily(glm4v, qwen_tokens(151_343), _GLM_SCALING, video=videos.glm4v(151_344))
_IDEFICS3 = VisionFamily(
    idefics3, idefics3_tokens, None, "lanczos", lambda side: TileScaling(side, 4 * side)
)
FAMILIES: dict[str, VisionFamily] = {
    "aya_vision": VisionFamily(
        aya_vision, aya_tokens, None, tiling=lambda side: GridScaling(side, 1, 12)
    ),
    "cohere2_vision": VisionFamily(
        cohere2_vision, cohere_tokens, None, tiling=lambda side: GridScaling(side, 1, 12, fits=True)
    ),
    "exaone4_5": VisionFamily(exaone4_5, qwen_tokens(67), _QWEN2_SCALING),
    "gemma3": VisionFamily(gemma3, gemma3_tokens, None, "bilinear"),
    "gemma4": VisionFamily(gemma4, gemma4_tokens, BudgetScaling(280)),
    "gemma4_unified": VisionFamily(gemma4_unified, gemma4_tokens, BudgetScaling(280)),
    "glm46v": _GLM4V._replace(video=videos.glm4v(151_344, is_latest=True)),
    "glm4v": _GLM4V,
    "glm4v_moe": VisionFamily(
        glm4v, qwen_tokens(151_363), _GLM_SCALING, video=videos.glm4v(151_364)
    ),
    "glm_ocr": VisionFamily(glm_ocr, qwen_tokens(59_280), _GLM_SCALING),
    "idefics3": _IDEFICS3,
    "internvl": VisionFamily(
        internvl,
        internvl_tokens,
        None,
        tiling=lambda side: GridScaling(side, 1, 12),
        video=videos.internvl,
    ),
    "kimi_k25": VisionFamily(kimi_k25, kimi_tokens, kimi_scaling),
    "lfm2_vl": VisionFamily(lfm2_vl, lfm2_tokens, lfm2_scaling, "bilinear"),
    "lfm3_vl": VisionFamily(
        lfm3_vl,
        qwen_tokens(125_030),
        AreaScaling(56 * 56, 28 * 28 * 1280),
        video=videos.qwen3_vl(125_029),
    ),
    "lighton_ocr": VisionFamily(mistral3, qwen_tokens(151_655), EdgeScaling(1540)),
    "llama4": VisionFamily(llama4, llama4_tokens, None, "bilinear", llama4_scaling),
    "llava": VisionFamily(llava, llava_tokens, EdgeScaling(1024)),
    "llava_next": VisionFamily(
        llava_next, anyres_tokens(32_000), None, canvases=llava_next_scaling
    ),
    "llava_onevision": VisionFamily(
        llava_next, anyres_tokens(151_646), None, canvases=llava_onevision_scaling
    ),
    "minicpmv4_6": VisionFamily(minicpmv4_6, minicpm_tokens, minicpm_scaling),
    "mistral3": VisionFamily(mistral3, mistral_tokens, EdgeScaling(1540)),
    "paddleocr_vl": VisionFamily(
        paddleocr_vl, qwen_tokens(100_295), AreaScaling(147_456, 2_359_296, growing="rounded")
    ),
    "qwen2_5_omni": _QWEN2_5_OMNI._replace(section=_THINKER),
    "qwen2_5_omni_thinker": _QWEN2_5_OMNI,
    "qwen2_5_vl": VisionFamily(
        qwen2_5_vl, qwen_tokens(151_655), _QWEN2_SCALING, video=videos.qwen2_5_vl
    ),
    "qwen2_vl": VisionFamily(qwen2_vl, qwen_tokens(151_655), _QWEN2_SCALING, video=videos.qwen2_vl),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_omni_moe": _QWEN3_OMNI._replace(section=_THINKER),
    "qwen3_omni_moe_thinker": _QWEN3_OMNI,
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "smolvlm": _IDEFICS3,
}

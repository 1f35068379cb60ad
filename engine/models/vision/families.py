"""Readers of vision encoders: a config's part for images becomes a VisionSpec, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from engine.images.nouns import AreaScaling, Scaling
from engine.models.config_reader import ConfigReader
from engine.models.spec import DecoderSpec
from engine.models.vision.spec import (
    AxialRope,
    MergerSpec,
    PixelSpec,
    VisionActivation,
    VisionNorm,
    VisionSpec,
)

_MAX_LAYERS = 10_000
_MAX_SIDE = 1024  # of a patch, in pixels
_MAX_MERGE = 16  # patches
_ACTIVATIONS: dict[str, VisionActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
}
_QWEN_EPS = 1e-6  # of all norms; no config says it
_CLIP = PixelSpec((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


class ImageTokens(NamedTuple):
    """Which tokens stand for an image; see ``ImageRules``."""

    token_id: int
    row_end_id: int | None = None
    end_id: int | None = None


class VisionFamily(NamedTuple):
    """How the encoder of a Hugging Face model_type is read."""

    # From the whole config, its part for images, which is read to its end, and the text model.
    read: Callable[[ConfigReader, ConfigReader, DecoderSpec], VisionSpec]
    tokens: Callable[[ConfigReader, Path], ImageTokens]
    scaling: Scaling  # as published, where no file beside config.json tells it


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


FAMILIES: dict[str, VisionFamily] = {
    "qwen2_vl": VisionFamily(
        qwen2_vl,
        lambda whole, _: ImageTokens(whole.whole("image_token_id", 151_655)),
        AreaScaling(3136, 12_845_056),
    ),
}


def _qwen(
    reader: ConfigReader,
    *,
    hidden: int,
    inner: int,
    out: int,
    norm: VisionNorm,
    activation: str,
    patch: int = 14,
) -> VisionSpec:
    """What all of Qwen's encoders have in common; the values are defaults but for the sizes."""
    reader.require("in_channels", 3)
    reader.require("in_chans", 3)
    side = reader.count("patch_size", patch, limit=_MAX_SIDE)
    reader.require("spatial_patch_size", side)
    merge = reader.count("spatial_merge_size", 2, limit=_MAX_MERGE)
    return VisionSpec(
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=(heads := _num_heads(reader, "num_heads", hidden)),
        num_layers=reader.count("depth", 32, limit=_MAX_LAYERS),
        patch_size=side,
        merge_size=merge,
        out_size=out,
        norm=norm,
        activation=_activation(reader, "hidden_act", activation),
        merger=MergerSpec(norm, hidden * merge**2),
        pixels=_CLIP,
        num_frames=reader.count("temporal_patch_size", 2, limit=_MAX_MERGE),
        rope=_rope(reader, "num_heads", hidden // heads),
    )


def _num_heads(reader: ConfigReader, key: str, hidden: int) -> int:
    count = reader.count(key, 16)
    if hidden % count:
        raise reader.error(key, f"must divide the {hidden} dimensions")
    return count


def _rope(reader: ConfigReader, heads_key: str, head_dim: int) -> AxialRope:
    """Newer exports say it in a section, older ones at most its base."""
    if head_dim % 4:
        raise reader.error(heads_key, f"makes heads of {head_dim} dimensions, not a multiple of 4")
    section = reader.section("rope_parameters")
    theta = reader.number("rope_theta", 10_000.0)
    if section is None:
        return AxialRope(theta)
    kind = section.text("rope_type", "axial")
    if kind not in ("axial", "default"):
        raise section.error("rope_type", f"is {kind[:80]!r}; only 'axial' is supported")
    theta = section.number("rope_theta", theta)
    section.finish()
    return AxialRope(theta)


def _activation(reader: ConfigReader, key: str, default: str) -> VisionActivation:
    name = reader.text(key, default)
    if name not in _ACTIVATIONS:
        raise reader.error(key, f"is {name[:80]!r}; known: {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]

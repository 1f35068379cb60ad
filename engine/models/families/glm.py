"""GLM: rope on half of the head, fused gate and up; GLM-4.5 and later have DeepSeek-V3's experts.

The smallest one with experts also has DeepSeek-V3's attention: ``deepseek.glm4_moe_lite``.
"""

from __future__ import annotations

from engine.models.config_reader import ConfigReader
from engine.models.families.deepseek import (
    draft_layers,
    layers_with_experts,
    read_deepseek_v3_experts,
)
from engine.models.families.family import Family
from engine.models.families.shared import (
    ignore_router_training,
    read_decoder,
    with_checked_experts,
)
from engine.models.rope_spec import MropeSpec
from engine.models.spec import DecoderSpec, MoeSpec, NormSpec, Placement

_MAX_POSITIONS = 131_072


def glm(reader: ConfigReader) -> DecoderSpec:
    """GLM-4 9B of 2024, in Hugging Face's own format."""
    return _glm(reader, "pre")


def glm4(reader: ConfigReader) -> DecoderSpec:
    """GLM-4-0414 and GLM-Z1: sandwich norms."""
    return _glm(reader, "sandwich")


def glm4_moe(reader: ConfigReader, mrope: MropeSpec | None = None) -> DecoderSpec:
    """GLM-4.5 to 4.7, and the Air variants; with ``mrope`` the text model of GLM-4.5V and 4.6V."""
    spec = read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        partial=0.5,
        max_positions=_MAX_POSITIONS,
        mrope=mrope,
        qkv_bias=reader.flag("attention_bias", mrope is not None),
        qk_norm=reader.flag("use_qk_norm"),
        moe=_experts(reader),
        layers=layers_with_experts(reader, 1),
        num_draft_layers=draft_layers(reader),
    )
    return with_checked_experts(reader, spec)


def glm4v_text(reader: ConfigReader, mrope: MropeSpec) -> DecoderSpec:
    """The text model of GLM-4.1V: GLM-4-0414, with the part of the head that rotates in the rope's
    section."""
    reader.require("attention_bias", True)
    return _with_image_positions(reader, mrope, has_bias=True)


def glm_ocr_text(reader: ConfigReader, mrope: MropeSpec) -> DecoderSpec:
    """The text model of GLM-OCR: the same without biases."""
    reader.require("attention_bias", False)
    reader.ignore("num_nextn_predict_layers")  # a draft layer, which is not read
    return _with_image_positions(reader, mrope, has_bias=False)


def solar_open(reader: ConfigReader) -> DecoderSpec:
    """Solar Open: GLM-4.5 with experts in all layers and rope on the whole head."""
    reader.refuse("use_qk_norm", "is true, which is not supported")
    reader.require("first_k_dense_replace", 0)
    moe = _experts(reader)
    spec = read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        head_dim=128,
        theta=1_000_000.0,
        max_positions=_MAX_POSITIONS,
        intermediate_size=moe.intermediate_size,  # of layers without experts; there are none
        qkv_bias=reader.flag("attention_bias"),
        moe=moe,
        layers=layers_with_experts(reader, 0),
        num_draft_layers=draft_layers(reader),
    )
    return with_checked_experts(reader, spec)


def _glm(reader: ConfigReader, placement: Placement) -> DecoderSpec:
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1.5625e-7)),
        placement=placement,
        head_dim=128,
        partial=0.5,
        interleaved=True,
        max_positions=_MAX_POSITIONS,
        qkv_bias=reader.flag("attention_bias", True),
    )


def _with_image_positions(reader: ConfigReader, mrope: MropeSpec, *, has_bias: bool) -> DecoderSpec:
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        placement="sandwich",
        interleaved=True,
        max_positions=_MAX_POSITIONS,
        mrope=mrope,
        qkv_bias=has_bias,
    )


def _experts(reader: ConfigReader) -> MoeSpec:
    ignore_router_training(reader)
    return read_deepseek_v3_experts(reader)


FAMILIES: dict[str, Family] = {
    "glm": Family(glm, "GLM-4 9B", "biases, interleaved partial rope"),
    "glm4": Family(glm4, "GLM-4-0414, GLM-Z1", "the same; norms before and after"),
    "glm4_moe": Family(
        glm4_moe,
        "GLM-4.5 to 4.7 and their Air",
        "biases, partial rope, QK norms in some, experts as in DeepSeek-V3",
    ),
    "solar_open": Family(solar_open, "Solar Open", "as `glm4_moe`, full rope"),
}

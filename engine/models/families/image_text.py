"""The text models of further multimodal models, whose images are read too.

See ``multimodal.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from engine.models.config_reader import ConfigReader
from engine.models.families import deepseek, glm
from engine.models.families.family import Family
from engine.models.families.multimodal import of_kind, text_part
from engine.models.rope_spec import MropeSpec
from engine.models.spec import DecoderSpec

_GLM = (
    *("video_token_id", "image_start_token_id", "image_end_token_id", "video_start_token_id"),
    "video_end_token_id",
)
_KIMI = (
    *("ignore_index", "media_placeholder_token_id", "use_unified_vision_chunk", "encoder_only"),
    *("video_placeholder", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("language_only", "projection_hidden_size", "projection_layer_norm_eps"),
)
_KIMI_TEXT = {"deepseek_v3": deepseek.deepseek_v3, "kimi_k2": deepseek.deepseek_v3}
_GLM_MROPE = MropeSpec((8, 12, 12))


def glm4v(reader: ConfigReader) -> DecoderSpec:
    """GLM-4.1V Thinking; in older exports the text model's keys are at the top level."""
    spec = text_part(reader, lambda text: glm.glm4v_text(text, _GLM_MROPE), _GLM)
    return dataclasses.replace(spec, naming="outer/glm4")


def glm4v_moe(reader: ConfigReader) -> DecoderSpec:
    """GLM-4.5V and 4.6V."""
    spec = text_part(reader, _glm4v_moe_text, _GLM)
    return dataclasses.replace(spec, naming="outer/glm4_moe")


def glm46v(reader: ConfigReader) -> DecoderSpec:
    """GLM-4.6V, with either of the text models."""
    text = reader.section("text_config")
    read = glm4v if text is None else of_kind(text, _GLM46V_TEXT, "glm4v_text")
    return read(reader)


def glm_ocr(reader: ConfigReader) -> DecoderSpec:
    """GLM-OCR 0.9B."""
    spec = text_part(reader, lambda text: glm.glm_ocr_text(text, _GLM_MROPE), _GLM)
    return dataclasses.replace(spec, naming="outer/glm4")


def kimi_k25(reader: ConfigReader) -> DecoderSpec:
    """Kimi K2.5 and later: Kimi K2, whose quantisation is told in the text section."""

    def read(text: ConfigReader) -> DecoderSpec:
        text.ignore("auto_map")  # transformers has the code
        return of_kind(text, _KIMI_TEXT, "kimi_k2")(text)

    reader.set_defaults({"tie_word_embeddings": False})
    spec = text_part(reader, read, _KIMI)
    return dataclasses.replace(spec, naming=f"whole/{spec.naming}", num_draft_layers=0)


def _glm4v_moe_text(text: ConfigReader) -> DecoderSpec:
    text.refuse("use_qk_norm", "is true, which is not supported in this family")
    # A draft layer is in no published checkpoint, whatever the config says.
    return dataclasses.replace(glm.glm4_moe(text, _GLM_MROPE), num_draft_layers=0)


_GLM46V_TEXT: dict[str, Callable[[ConfigReader], DecoderSpec]] = {
    "glm4v_moe_text": glm4v_moe,
    "glm4v_text": glm4v,
}
IMAGE_TEXT: dict[str, Family] = {
    "glm46v": Family(glm46v, "GLM-4.6V", "as `glm4v` or `glm4v_moe`; accepts images"),
    "glm4v": Family(glm4v, "GLM-4.1V Thinking, GLM-4.6V Flash", "as `glm4`; accepts images"),
    "glm4v_moe": Family(glm4v_moe, "GLM-4.5V, GLM-4.6V", "as `glm4_moe`; accepts images"),
    "kimi_k25": Family(
        kimi_k25, "Kimi K2.5 to K2.7", "as `kimi_k2`; accepts images", has_remote_code=True
    ),
    "glm_ocr": Family(glm_ocr, "GLM-OCR", "as `glm4`, without biases; accepts images"),
}

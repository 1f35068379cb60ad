"""The text models of further multimodal models, whose images are read too.

See ``multimodal.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from engine.models.config_reader import ConfigReader
from engine.models.families import cohere, deepseek, ernie, glm, hybrid, llama
from engine.models.families.family import Family
from engine.models.families.multimodal import QWEN3_5_MROPE, of_kind, text_part
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
_COHERE = (
    *("adapter_layer_norm_eps", "alignment_intermediate_size", "downsample_factor"),
    *("vision_feature_layer", "vision_feature_select_strategy"),
)
# Values that Aya Vision's text sections may leave out; see ``multimodal.py``.
_COHERE_DEFAULTS = {
    **{"hidden_size": 8192, "intermediate_size": 22_528, "num_hidden_layers": 40},
    **{"num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 256_000},
    **{"max_position_embeddings": 8192, "eos_token_id": 255_001},
}
_COHERE_TEXT = {"cohere": cohere.cohere, "cohere2": cohere.cohere2}
_EXAONE = ("video_token_id", "vision_start_token_id", "vision_end_token_id", "vocab_size")
_EXAONE_TEXT = {"exaone4": llama.exaone4, "exaone4_5_text": llama.exaone4}
_EXAONE_DRAFTS = ("num_nextn_predict_layers", "num_mtp_layers")  # under ``mtp.``, not read
_LFM2 = (
    *("downsample_factor", "projector_bias", "projector_hidden_act", "projector_hidden_size"),
    *("projector_use_layernorm", "vision_feature_layer"),
    # Repeated from the processor's file.
    *("do_image_splitting", "encoder_patch_size", "max_image_tokens", "max_num_patches"),
    *("max_pixels_tolerance", "max_tiles", "min_image_tokens", "min_tiles", "tile_size"),
    *("use_image_special_tokens", "use_thumbnail"),
)
_LFM2_TEXT = {"lfm2": hybrid.lfm2, "lfm2_moe": hybrid.lfm2_moe}
_LFM3 = (
    *("projector_bias", "projector_hidden_act", "projector_hidden_size"),
    *("video_token_id", "vision_start_token_id", "vision_end_token_id"),
)
_LIGHTON = ("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size")
_MINICPM = (
    *("downsample_mode", "drop_vision_last_layer", "image_size", "insert_layer_id"),
    *("merge_kernel_size", "merger_times", "patch_size", "video_token_id"),
)
_MINICPM_TEXT = {"qwen3_5_text": hybrid.qwen3_5, "qwen3_5_moe_text": hybrid.qwen3_5_moe}
_PADDLE = ("video_token_id", "vision_start_token_id", "vision_end_token_id")
# Switches of the training code, and of its kernels.
_PADDLE_TRAINING = (
    *("attention_probs_dropout_prob", "hidden_dropout_prob", "ignored_index", "use_3d_rope"),
    *("use_flash_attention", "weight_share_add_bias"),
)
_PADDLE_MROPE = MropeSpec((16, 24, 24))
_GLM_MROPE = MropeSpec((8, 12, 12))


def aya_vision(reader: ConfigReader) -> DecoderSpec:
    """Aya Vision 8B and 32B."""
    return _cohere(reader, "whole/llama")


def cohere2_vision(reader: ConfigReader) -> DecoderSpec:
    """Command A Vision."""
    return _cohere(reader, "outer/llama")


def exaone4_5(reader: ConfigReader) -> DecoderSpec:
    """EXAONE 4.5 33B."""

    def read(text: ConfigReader) -> DecoderSpec:
        read_text = of_kind(text, _EXAONE_TEXT, "exaone4")
        text.set_defaults({"model_type": "exaone4"})
        for key in _EXAONE_DRAFTS:
            text.ignore(key)
        return read_text(text)

    reader.set_defaults({"tie_word_embeddings": False})
    return dataclasses.replace(text_part(reader, read, _EXAONE), naming="outer/exaone4")


def lfm2_vl(reader: ConfigReader) -> DecoderSpec:
    """LFM2-VL."""

    def read(text: ConfigReader) -> DecoderSpec:
        read_text = of_kind(text, _LFM2_TEXT, "lfm2")
        text.set_defaults({"model_type": "lfm2"})
        return read_text(text)

    reader.set_defaults({"tie_word_embeddings": reader.flag("tie_embedding", True)})
    return dataclasses.replace(text_part(reader, read, _LFM2), naming="outer/lfm2")


def lfm3_vl(reader: ConfigReader) -> DecoderSpec:
    """LFM3-VL."""

    def read(text: ConfigReader) -> DecoderSpec:
        text.require("model_type", "lfm3")
        text.set_defaults({"model_type": "lfm3"})
        return hybrid.lfm3(text)

    reader.set_defaults({"tie_word_embeddings": True})
    spec = text_part(reader, read, _LFM3)
    return dataclasses.replace(spec, naming=f"outer/{spec.naming}")


def lighton_ocr(reader: ConfigReader) -> DecoderSpec:
    """LightOnOCR: Qwen3 behind Pixtral's encoder."""

    def read(text: ConfigReader) -> DecoderSpec:
        text.require("model_type", "qwen3")
        text.set_defaults({"model_type": "qwen3"})
        return llama.qwen3(text)

    reader.set_defaults({"tie_word_embeddings": True})
    return dataclasses.replace(text_part(reader, read, _LIGHTON), naming="outer/llama")


def minicpmv4_6(reader: ConfigReader) -> DecoderSpec:
    """MiniCPM-V 4.6: Qwen3.5 with positions of one dimension, also in images."""

    def read(text: ConfigReader) -> DecoderSpec:
        read_text = of_kind(text, _MINICPM_TEXT, "qwen3_5_text")
        text.set_defaults({"model_type": "qwen3_5_text"})
        spec = read_text(text, mrope=QWEN3_5_MROPE)
        assert spec.rope is not None
        return dataclasses.replace(spec, rope=dataclasses.replace(spec.rope, mrope=None))

    reader.set_defaults({"tie_word_embeddings": False})
    return dataclasses.replace(text_part(reader, read, _MINICPM), naming="outer/qwen3_5_text")


def paddleocr_vl(reader: ConfigReader) -> DecoderSpec:
    """PaddleOCR-VL; in its own config the text model's keys are at the top level."""

    def read(text: ConfigReader) -> DecoderSpec:
        text.require("compression_ratio", 1.0)
        text.require("rope_is_neox_style", True)
        text.refuse("sliding_window", "is set, which is not supported in this family")
        for key in _PADDLE_TRAINING:
            text.ignore(key)
        return ernie.ernie4_5(text, _PADDLE_MROPE)

    return text_part(reader, read, _PADDLE)


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


def _cohere(reader: ConfigReader, naming: str) -> DecoderSpec:
    def read(text: ConfigReader) -> DecoderSpec:
        read_text = of_kind(text, _COHERE_TEXT, "cohere2")
        text.set_defaults({"model_type": "cohere2", **_COHERE_DEFAULTS})
        return read_text(text)

    reader.set_defaults({"tie_word_embeddings": True})
    return dataclasses.replace(text_part(reader, read, _COHERE), naming=naming)


def _glm4v_moe_text(text: ConfigReader) -> DecoderSpec:
    text.refuse("use_qk_norm", "is true, which is not supported in this family")
    # A draft layer is in no published checkpoint, whatever the config says.
    return dataclasses.replace(glm.glm4_moe(text, _GLM_MROPE), num_draft_layers=0)


_GLM46V_TEXT: dict[str, Callable[[ConfigReader], DecoderSpec]] = {
    "glm4v_moe_text": glm4v_moe,
    "glm4v_text": glm4v,
}
FAMILIES: dict[str, Family] = {
    "aya_vision": Family(aya_vision, "Aya Vision 8B and 32B", "as `cohere2`; accepts images"),
    "cohere2_vision": Family(cohere2_vision, "Command A Vision", "as `cohere2`; accepts images"),
    "exaone4_5": Family(exaone4_5, "EXAONE 4.5 33B", "as `exaone4`; accepts images"),
    "glm46v": Family(glm46v, "GLM-4.6V", "as `glm4v` or `glm4v_moe`; accepts images, video"),
    "glm4v": Family(glm4v, "GLM-4.1V Thinking, GLM-4.6V Flash", "as `glm4`; accepts images, video"),
    "glm4v_moe": Family(glm4v_moe, "GLM-4.5V, GLM-4.6V", "as `glm4_moe`; accepts images, video"),
    "lfm2_vl": Family(lfm2_vl, "LFM2-VL 450M to 3B", "as `lfm2`; accepts images"),
    "lfm3_vl": Family(lfm3_vl, "LFM3-VL 2B", "as `lfm3`; accepts images, video"),
    "lighton_ocr": Family(lighton_ocr, "LightOnOCR 1B", "as `qwen3`; accepts images"),
    "minicpmv4_6": Family(minicpmv4_6, "MiniCPM-V 4.6", "as `qwen3_5_text`; accepts images"),
    "paddleocr_vl": Family(
        paddleocr_vl,
        "PaddleOCR-VL 0.9B",
        "as `ernie4_5`, with halves of the head rotated; accepts images",
        has_remote_code=True,
    ),
    "kimi_k25": Family(
        kimi_k25, "Kimi K2.5 to K2.7", "as `kimi_k2`; accepts images", has_remote_code=True
    ),
    "glm_ocr": Family(glm_ocr, "GLM-OCR", "as `glm4`, without biases; accepts images"),
}

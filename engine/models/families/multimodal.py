"""The text models of published multimodal models.

Their vision parts are read by ``engine/models/vision``, and their audio parts by
``engine/models/audio``, for families whose images or audio are supported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from engine.models.config_reader import ConfigReader
from engine.models.families import deepseek, gemma, granite, hybrid, llama, llama4, moe
from engine.models.families import gemma3n as gemma_3n
from engine.models.families import gemma4 as gemma_4
from engine.models.families.family import Family
from engine.models.families.shared import read_dtype
from engine.models.rope_spec import MropeSpec
from engine.models.spec import DecoderSpec

_T = TypeVar("_T")

_VISION = ("vision_config", "image_token_id", "image_token_index")
_GEMMA = ("mm_tokens_per_image", "boi_token_index", "eoi_token_index")
_GEMMA4 = (
    *("audio_config", "audio_token_id", "video_token_id", "vision_soft_tokens_per_image"),
    *("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"),
)
_GEMMA3N = (*_GEMMA4, "audio_soft_tokens_per_image")
_QWEN = ("video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")
# Of the text model, at the top level as well in some exports; its own may differ.
_QWEN_REPEATED = (
    *("hidden_act", "hidden_size", "intermediate_size", "layer_types", "max_position_embeddings"),
    *("max_window_layers", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
    *("rms_norm_eps", "rope_scaling", "rope_theta", "sliding_window", "use_sliding_window"),
    "vocab_size",
)
QWEN2_MROPE = MropeSpec((16, 24, 24))
QWEN3_MROPE = MropeSpec((24, 20, 20), interleaved=True)
QWEN3_5_MROPE = MropeSpec((11, 11, 10), interleaved=True)
_MISTRAL = (
    *("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"),
    "vision_feature_layer",
)

_LLAVA = (
    *("image_seq_length", "multimodal_projector_bias", "projector_hidden_act", "ignore_index"),
    *("vision_feature_layer", "vision_feature_select_strategy", "pixel_values_dtype"),
    "vocab_size",  # the text model has its own
)
_LLAVA_NEXT = (
    *(*_LLAVA, "image_grid_pinpoints", "use_image_newline_parameter", "vision_aspect_ratio"),
    *("video_token_index", "video_token_id", "pretrained_language_model"),
    "pretrained_vision_tower",
)
# Values that text sections leave out: until about 4.51, transformers saved none that equals its
# class's default.
_LLAMA_DEFAULTS = {
    **{"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 2048},
    **{"rms_norm_eps": 1e-6, "eos_token_id": 2},
}
_MISTRAL_DEFAULTS = {
    **{**_LLAMA_DEFAULTS, "intermediate_size": 14336, "num_key_value_heads": 8},
    **{"max_position_embeddings": 131_072, "sliding_window": 4096},
}
QWEN2_DEFAULTS = {
    **{"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 151_936},
    **{"max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
}
_LLAMA4_DEFAULTS = {
    **{"hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48, "eos_token_id": 2},
    **{"num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 202_048},
    "attention_chunk_size": 8192,
}
_GEMMA3_DEFAULTS = {
    **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208},
    "eos_token_id": 1,
}
# Keys of the encoder, of training, and repeated ones; and those of the text section.
_IDEFICS3 = ("scale_factor", "vocab_size", "use_reentrant_checkpointing", "_pad_token_id")
_IDEFICS3_TEXT = (
    *("_flash_attn_2_enabled", "neftune_noise_alpha", "perceiver_config"),
    "pixel_shuffle_factor",
)
_INTERNVL = (
    *("downsample_ratio", "image_seq_length", "projector_hidden_act", "vision_feature_layer"),
    "vision_feature_select_strategy",
)
# Switches of the training code, in the text sections of InternVL3.5.
_INTERNVL_TRAINING = ("debug", "ep_size", "micro_forward", "skip_checkpoint", "use_deepep")
_LLAVA_TEXT: dict[str, tuple[Callable[[ConfigReader], DecoderSpec], dict[str, Any]]] = {
    "granite": (granite.granite, {}),
    "llama": (llama.llama, _LLAMA_DEFAULTS),
    "mistral": (llama.mistral, _MISTRAL_DEFAULTS),
    "qwen2": (llama.qwen2, QWEN2_DEFAULTS),
}

_INTERNVL_TEXT: dict[str, Callable[[ConfigReader], DecoderSpec]] = {
    "llama": llama.llama,
    "qwen2": llama.qwen2,
    "qwen3": llama.qwen3,
    "qwen3_moe": moe.qwen3_moe,
}
_MISTRAL_TEXT: dict[str, tuple[Callable[[ConfigReader], DecoderSpec], dict[str, Any]]] = {
    "ministral3": (llama.ministral3, {}),
    "mistral": (llama.mistral, _MISTRAL_DEFAULTS),
    "mistral4": (deepseek.mistral4, {}),
}


def gemma3(reader: ConfigReader) -> DecoderSpec:
    """Gemma 3 4B, 12B and 27B."""

    def read(text: ConfigReader) -> DecoderSpec:
        text.set_defaults(_GEMMA3_DEFAULTS)
        return gemma.gemma3(text)

    spec = text_part(reader, read, _GEMMA)
    layers = (dataclasses.replace(layer, bidirectional_images=True) for layer in spec.layers)
    return dataclasses.replace(spec, layers=tuple(layers))


def gemma3n(reader: ConfigReader) -> DecoderSpec:
    """Gemma 3n with image and sound encoders, which are not read."""
    return text_part(reader, gemma_3n.gemma3n, _GEMMA3N)


def gemma4(reader: ConfigReader) -> DecoderSpec:
    """Gemma 4 with image and sound encoders."""
    return text_part(reader, gemma_4.gemma4, _GEMMA4)


def gemma4_unified(reader: ConfigReader) -> DecoderSpec:
    """Gemma 4 without encoders, which reads images and sound directly; images are read here."""
    return text_part(reader, gemma_4.gemma4_unified, _GEMMA4)


def idefics3(reader: ConfigReader) -> DecoderSpec:
    """Idefics3 8B and SmolVLM."""

    def read(text: ConfigReader) -> DecoderSpec:
        text.require("model_type", "llama")
        for key in ("qk_layer_norms", "use_resampler"):
            text.require(key, False)
        for key in _IDEFICS3_TEXT:
            text.ignore(key)
        text.set_defaults({"model_type": "llama", **_LLAMA_DEFAULTS, "rms_norm_eps": 1e-5})
        return llama.llama(text)

    reader.set_defaults({"tie_word_embeddings": False})
    return text_part(reader, read, _IDEFICS3)


def internvl(reader: ConfigReader) -> DecoderSpec:
    """InternVL3 and 3.5, in Hugging Face's own format."""

    def read(text: ConfigReader) -> DecoderSpec:
        read_text = of_kind(text, _INTERNVL_TEXT, "qwen2")
        text.set_defaults({"model_type": "qwen2"})
        for key in _INTERNVL_TRAINING:
            text.ignore(key)
        spec = read_text(text)
        return dataclasses.replace(spec, naming="internvl_moe" if spec.moe else "")

    spec = text_part(reader, read, _INTERNVL)
    text = reader.section("text_config")
    if text is None or "tie_word_embeddings" not in text:
        return spec
    # The outer config says that they are tied even where the checkpoint has both.
    return dataclasses.replace(spec, tie_word_embeddings=text.flag("tie_word_embeddings"))


def llama_4(reader: ConfigReader) -> DecoderSpec:
    """Llama 4 Scout and Maverick."""

    def read(text: ConfigReader) -> DecoderSpec:
        text.set_defaults({"model_type": "llama4_text", **_LLAMA4_DEFAULTS})
        return llama4.llama4_text(text)

    return text_part(reader, read, ("boi_token_index", "eoi_token_index"))


def mistral3(reader: ConfigReader) -> DecoderSpec:
    """Mistral Small 3.1, 3.2 and 4, and Ministral 3."""

    def read(text: ConfigReader) -> DecoderSpec:
        read_text, defaults = of_kind(text, _MISTRAL_TEXT, "mistral")
        text.set_defaults({"model_type": "mistral", **defaults})
        return read_text(text)

    spec = text_part(reader, read, _MISTRAL)
    return dataclasses.replace(spec, naming=spec.naming and f"mistral3_{spec.naming}")


def llava(reader: ConfigReader) -> DecoderSpec:
    """LLaVA 1.5, LLaVA-Interleave and Pixtral 12B."""
    return text_part(reader, _llava_text("llama"), _LLAVA)


def llava_next(reader: ConfigReader) -> DecoderSpec:
    """LLaVA-NeXT and Granite Vision 3."""
    return dataclasses.replace(
        text_part(reader, _llava_text("llama"), _LLAVA_NEXT), naming="whole/llama"
    )


def llava_onevision(reader: ConfigReader) -> DecoderSpec:
    """LLaVA-OneVision."""
    spec = text_part(reader, _llava_text("qwen2"), _LLAVA_NEXT)
    text = reader.section("text_config")
    is_tied = spec.tie_word_embeddings
    if text is not None and text.flag("tie_word_embeddings"):
        is_tied = True  # whatever the outer config says
    return dataclasses.replace(spec, tie_word_embeddings=is_tied, naming="whole/llama")


def _llava_text(usual: str) -> Callable[[ConfigReader], DecoderSpec]:
    def read(text: ConfigReader) -> DecoderSpec:
        read_text, defaults = of_kind(text, _LLAVA_TEXT, usual)
        text.set_defaults({"model_type": usual, **defaults})
        text.ignore("is_composition")
        return read_text(text)

    return read


def qwen_vl(reader: ConfigReader) -> DecoderSpec:
    """Qwen2-VL and Qwen2.5-VL; in older exports the text model's keys are at the top level."""

    def read(text: ConfigReader) -> DecoderSpec:
        for key in _QWEN:
            text.ignore(key)
        return llama.qwen2(text, mrope=QWEN2_MROPE)

    return text_part(reader, read, (*_QWEN, *_QWEN_REPEATED))


def qwen3_vl(reader: ConfigReader) -> DecoderSpec:
    """Qwen3-VL, dense."""
    return text_part(reader, lambda text: llama.qwen3(text, mrope=QWEN3_MROPE), _QWEN)


def qwen3_vl_moe(reader: ConfigReader) -> DecoderSpec:
    """Qwen3-VL with experts, whose weights always sum to one, whatever the text config says."""

    def read(text: ConfigReader) -> DecoderSpec:
        spec = moe.qwen3_moe(text, mrope=QWEN3_MROPE)
        assert spec.moe is not None
        return dataclasses.replace(spec, moe=dataclasses.replace(spec.moe, normalised=True))

    return text_part(reader, read, _QWEN)


def qwen3_5(reader: ConfigReader) -> DecoderSpec:
    """Qwen3.5, dense."""
    return text_part(reader, lambda text: hybrid.qwen3_5(text, mrope=QWEN3_5_MROPE), _QWEN)


def qwen3_5_moe(reader: ConfigReader) -> DecoderSpec:
    """Qwen3.5 with experts."""
    return text_part(reader, lambda text: hybrid.qwen3_5_moe(text, mrope=QWEN3_5_MROPE), _QWEN)


def of_kind(text: ConfigReader, table: Mapping[str, _T], default: str) -> _T:
    """Return the entry for a text section's ``model_type``. Raises ModelLoadError if none is."""
    kind = text.text("model_type", default)
    if kind not in table:
        raise text.error("model_type", f"is {kind[:80]!r}; known: {', '.join(table)}")
    return table[kind]


def text_part(
    reader: ConfigReader, read: Callable[[ConfigReader], DecoderSpec], ignored: tuple[str, ...]
) -> DecoderSpec:
    """Read the text section with ``read``, or the whole config if it has none.

    The outer config takes precedence for end tokens, dtype and tied embeddings.
    """
    for key in (*_VISION, *ignored):
        reader.ignore(key)
    text = reader.section("text_config")
    if text is None:
        return read(reader)
    for key in (*_VISION, *ignored):
        if key.endswith(("_token_id", "_token_index")):
            text.ignore(key)  # repeated there, as in GLM-4.5V
    text.section("quantization_config")  # see engine/models/checkpoint.py
    spec = read(text)
    text.finish()
    dtype = read_dtype(reader)
    return dataclasses.replace(
        spec,
        architecture=reader.text("model_type"),
        eos_token_ids=reader.token_ids("eos_token_id") or spec.eos_token_ids,
        checkpoint_dtype=dtype or spec.checkpoint_dtype,
        tie_word_embeddings=reader.flag("tie_word_embeddings", spec.tie_word_embeddings),
    )


FAMILIES: dict[str, Family] = {
    "gemma3": Family(gemma3, "Gemma 3 4B, 12B and 27B", "as `gemma3_text`; accepts images"),
    "gemma3n": Family(gemma3n, "Gemma 3n E2B and E4B", "as `gemma3n_text`; text only"),
    "gemma4": Family(
        gemma4,
        "Gemma 4 31B, 26B-A4B, E4B and E2B",
        "as `gemma4_text`; accepts images, not audio",
    ),
    "gemma4_unified": Family(
        gemma4_unified,
        "Gemma 4 12B",
        "as `gemma4_text`; accepts images, not audio",
    ),
    "idefics3": Family(
        idefics3,
        "Idefics3 8B, SmolVLM 256M, 500M and 2.2B",
        "as `llama`; accepts images",
    ),
    "internvl": Family(
        internvl,
        "InternVL3 and 3.5, those converted for transformers (`-hf`, `-HF`)",
        "as `qwen2`, `qwen3`, `qwen3_moe` or `llama`; accepts images, video",
    ),
    "llama4": Family(llama_4, "Llama 4 Scout and Maverick", "as `llama4_text`; accepts images"),
    "llava": Family(
        llava,
        "LLaVA 1.5, LLaVA-Interleave, Pixtral 12B",
        "as `llama`, `mistral` or `qwen2`; accepts images",
    ),
    "llava_next": Family(
        llava_next,
        "LLaVA 1.6 (NeXT), Granite Vision 3",
        "as `llama`, `mistral`, `qwen2` or `granite`; accepts images",
    ),
    "llava_onevision": Family(
        llava_onevision, "LLaVA-OneVision", "as `qwen2`; accepts images, not video"
    ),
    "mistral3": Family(
        mistral3,
        "Mistral Small 3.1, 3.2 and 4, Ministral 3",
        "as `mistral`, `ministral3` or `mistral4`; accepts images",
    ),
    "qwen2_5_vl": Family(qwen_vl, "Qwen2.5-VL", "as `qwen2`; accepts images, video"),
    "qwen2_vl": Family(qwen_vl, "Qwen2-VL", "as `qwen2`; accepts images, video"),
    "qwen3_5": Family(qwen3_5, "Qwen3.5", "as `qwen3_5_text`; accepts images, video"),
    "qwen3_5_moe": Family(
        qwen3_5_moe,
        "Qwen3.5 35B-A3B and larger",
        "as `qwen3_5_moe_text`; accepts images, video",
    ),
    "qwen3_5_moe_text": Family(
        partial(hybrid.qwen3_5_moe, mrope=QWEN3_5_MROPE),
        "Qwen3.5 with experts, text model only",
        "as `qwen3_5_text`; experts and a gated shared expert",
    ),
    "qwen3_5_text": Family(
        partial(hybrid.qwen3_5, mrope=QWEN3_5_MROPE),
        "Qwen3.5, text model only",
        "gated delta rule in three of four layers, gated attention, QK norms, partial rope",
    ),
    "qwen3_vl": Family(qwen3_vl, "Qwen3-VL, dense", "as `qwen3`; accepts images, video"),
    "qwen3_vl_moe": Family(
        qwen3_vl_moe,
        "Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B",
        "as `qwen3_moe`; accepts images, video",
    ),
    "smolvlm": Family(
        idefics3,
        "SmolVLM2 256M, 500M and 2.2B",
        "as `llama`; accepts images, not video",
    ),
}

"""The text models of Qwen's omni models; how they hear and speak is not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from engine.models.config_reader import ConfigReader
from engine.models.families import llama, moe
from engine.models.families.family import Family
from engine.models.families.multimodal import QWEN2_MROPE, QWEN3_MROPE, text_part
from engine.models.spec import DecoderSpec

_END = 151_645  # <|im_end|>, which generate() ends texts with: configs do not say so
# Of the speaking parts, and of the tokens between them.
_OUTER = (
    *("talker_config", "code2wav_config", "token2wav_config", "enable_audio_output"),
    *("enable_talker", "im_start_token_id", "im_end_token_id", "tts_pad_token_id"),
    *("tts_bos_token_id", "tts_eos_token_id", "system_token_id", "user_token_id"),
    "assistant_token_id",
)
_SEEN_AND_HEARD = (
    *("audio_config", "audio_token_id", "audio_token_index", "audio_start_token_id"),
    *("audio_end_token_id", "video_token_id", "video_token_index", "vision_start_token_id"),
    *("vision_end_token_id", "vision_token_id", "user_token_id", "position_id_per_seconds"),
    *("seconds_per_chunk", "ignore_index"),
)


def qwen2_5_omni(reader: ConfigReader) -> DecoderSpec:
    """Qwen2.5-Omni."""
    return _whole(reader, qwen2_5_omni_thinker)


def qwen2_5_omni_thinker(reader: ConfigReader) -> DecoderSpec:
    """The part of Qwen2.5-Omni that makes text."""
    return _thinker(reader, lambda text: llama.qwen2(text, mrope=QWEN2_MROPE))


def qwen3_omni_moe(reader: ConfigReader) -> DecoderSpec:
    """Qwen3-Omni."""
    return _whole(reader, qwen3_omni_moe_thinker)


def qwen3_omni_moe_thinker(reader: ConfigReader) -> DecoderSpec:
    """The part of Qwen3-Omni that makes text."""

    def read(text: ConfigReader) -> DecoderSpec:
        text.refuse("shared_expert_intermediate_size", "is set, which is not supported")
        text.set_defaults({"norm_topk_prob": True})
        return moe.qwen3_moe(text, mrope=QWEN3_MROPE)

    return _thinker(reader, read)


def _whole(reader: ConfigReader, read: Callable[[ConfigReader], DecoderSpec]) -> DecoderSpec:
    """Read a whole model's thinker with ``read``."""
    for key in _OUTER:
        reader.ignore(key)
    thinker = reader.section("thinker_config")
    if thinker is None:
        raise reader.error("thinker_config", "is missing")
    thinker.set_defaults({"model_type": reader.text("model_type")})
    spec = read(thinker)
    thinker.finish()
    dtype = reader.text("torch_dtype", "") or reader.text("dtype", "")
    return dataclasses.replace(
        spec,
        architecture=reader.text("model_type"),
        checkpoint_dtype=spec.checkpoint_dtype or dtype or None,
    )


def _thinker(reader: ConfigReader, read: Callable[[ConfigReader], DecoderSpec]) -> DecoderSpec:
    reader.set_defaults({"tie_word_embeddings": False})
    spec = text_part(reader, read, _SEEN_AND_HEARD)
    return dataclasses.replace(spec, eos_token_ids=spec.eos_token_ids or (_END,))


FAMILIES: dict[str, Family] = {
    "qwen2_5_omni": Family(
        qwen2_5_omni, "Qwen2.5-Omni 3B and 7B", "as `qwen2`; accepts images, not audio"
    ),
    "qwen2_5_omni_thinker": Family(
        qwen2_5_omni_thinker,
        "the part of Qwen2.5-Omni that makes text",
        "as `qwen2`; accepts images, not audio",
    ),
    "qwen3_omni_moe": Family(
        qwen3_omni_moe, "Qwen3-Omni 30B-A3B", "as `qwen3_moe`; accepts images, not audio"
    ),
    "qwen3_omni_moe_thinker": Family(
        qwen3_omni_moe_thinker,
        "the part of Qwen3-Omni that makes text",
        "as `qwen3_moe`; accepts images, not audio",
    ),
}

"""The text models of models that hear, whose audio parts are read by ``engine/models/audio``.

See ``multimodal.py``.
"""

from __future__ import annotations

import dataclasses

from engine.models.config_reader import ConfigReader
from engine.models.families import llama
from engine.models.families.family import Family
from engine.models.families.multimodal import QWEN2_DEFAULTS, text_part
from engine.models.spec import DecoderSpec

_HEARING = (
    *("audio_config", "audio_token_id", "audio_token_index", "ignore_index"),
    *("vocab_size", "hidden_size"),  # the text section's
)
# Values that the text sections of Voxtral's and Qwen3-ASR's configs leave out.
_VOXTRAL_DEFAULTS = {
    **{"model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "head_dim": 128},
    **{"num_hidden_layers": 30, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"vocab_size": 131_072, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5},
}
_QWEN3_ASR_DEFAULTS = {
    **{"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128},
    **{"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
    **{"vocab_size": 151_936, "max_position_embeddings": 65_536, "rms_norm_eps": 1e-6},
}


def qwen2_audio(reader: ConfigReader) -> DecoderSpec:
    """Qwen2-Audio 7B."""

    def read(text: ConfigReader) -> DecoderSpec:
        text.require("model_type", "qwen2")
        text.require("use_mrope", False)
        text.set_defaults({"model_type": "qwen2", **QWEN2_DEFAULTS})
        return llama.qwen2(text)

    # Never tied, whatever the text section says.
    return dataclasses.replace(text_part(reader, read, _HEARING), tie_word_embeddings=False)


def qwen3_asr(reader: ConfigReader) -> DecoderSpec:
    """Qwen3-ASR, in Hugging Face's own format."""

    def read(text: ConfigReader) -> DecoderSpec:
        text.require("model_type", "qwen3")
        text.set_defaults(_QWEN3_ASR_DEFAULTS)
        return llama.qwen3(text)

    reader.set_defaults({"tie_word_embeddings": True})
    ignored = ("timestamp_token_id", "token_classification_bias")  # of the aligner
    return text_part(reader, read, (*_HEARING, *ignored))


def voxtral(reader: ConfigReader) -> DecoderSpec:
    """Voxtral Mini and Small."""

    def read(text: ConfigReader) -> DecoderSpec:
        text.require("model_type", "llama")
        text.set_defaults(_VOXTRAL_DEFAULTS)
        return llama.llama(text)

    spec = text_part(reader, read, (*_HEARING, "projector_hidden_act"))
    return dataclasses.replace(spec, tie_word_embeddings=False)  # never


FAMILIES: dict[str, Family] = {
    "qwen2_audio": Family(qwen2_audio, "Qwen2-Audio 7B", "as `qwen2`; accepts audio"),
    "qwen3_asr": Family(qwen3_asr, "Qwen3-ASR", "as `qwen3`; accepts audio"),
    "voxtral": Family(voxtral, "Voxtral Mini 3B, Voxtral Small 24B", "as `llama`; accepts audio"),
}

"""Readers of audio encoders: a config's audio section becomes an AudioSpec, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from engine.audio.transcription import TranscriptionRules
from engine.audio.types import AudioRules
from engine.models.audio.spec import AudioSpec, FrameConvSpec, MelSpec, PlaneConvSpec
from engine.models.config_reader import ConfigReader
from engine.models.source_spec import PLACES_ALIGNMENT
from engine.models.spec import DecoderSpec
from engine.models.vision.shared import MAX_LAYERS, read_activation, read_num_heads
from engine.models.vision.spec import MergerSpec, VisionNorm

_EPS = 1e-5  # of all norms; not in any config
_MAX_MELS = 1024
# Instructions for models without a form of their own.
_TRANSCRIBE = "Write down the speech{}, word for word. Answer with its text alone."
_TRANSLATE = "Translate the speech into English. Answer with the translation alone."
_MAX_FRAMES = 100_000


class AudioFamily(NamedTuple):
    """How the encoder of a Hugging Face model_type is read."""

    # Reads the whole config, its audio section (to the end), and the text model's spec.
    read: Callable[[ConfigReader, ConfigReader, DecoderSpec], AudioSpec]
    # How its tokens are counted, from the token's id and the encoder.
    rules: Callable[[int, AudioSpec], AudioRules]
    token_keys: tuple[str, ...]  # keys of the token's id, in order of precedence
    token_id: int  # if no key is present
    is_flat: bool = False  # the config has no audio section; the text model's reader ends it


def qwen2_audio(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> AudioSpec:
    """Qwen2-Audio (Chu et al. 2024): Whisper's encoder, whose states are averaged in pairs."""
    projector = MergerSpec(None, None)
    return replace(_whisper(reader, text, projector), pool=2)


def voxtral(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> AudioSpec:
    """Voxtral (Mistral AI 2025): Whisper's encoder, whose states are joined in fours."""
    reader.ignore("vocab_size")
    activation = read_activation(whole, "projector_hidden_act", "gelu")
    projector = MergerSpec(None, text.hidden_size, activation, bias=False)
    base = _whisper(reader, text, projector)
    joined, rest = divmod(base.intermediate_size, base.hidden_size)
    if rest or base.window % joined:
        raise reader.error("intermediate_size", "must be a number of whole states")
    return replace(base, joined=joined)


def qwen3_asr(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> AudioSpec:
    """Qwen3-ASR (Qwen Team 2026): the encoder of Qwen3-Omni."""
    base = _transformer(reader, text, MergerSpec(None, None))
    chunk = 2 * reader.count("n_window", 50, limit=_MAX_FRAMES)
    span = reader.count("n_window_infer", 800, limit=_MAX_FRAMES)
    if span % chunk:
        raise reader.error("n_window_infer", f"must be a multiple of a chunk of {chunk} frames")
    out = reader.count("output_dim", 3584)
    channels = reader.count("downsample_hidden_size", 480)
    convolutions = PlaneConvSpec(chunk, channels)
    if reader.count("max_position_embeddings", 13) < convolutions.num_states:
        raise reader.error("max_position_embeddings", "is less than the states of a chunk")
    return replace(
        base,
        out_size=out,
        convolutions=convolutions,
        projector=MergerSpec(None, base.hidden_size, base.activation),
        key_bias=True,
        window=span // chunk * convolutions.num_states,
    )


def whisper(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> AudioSpec:
    """Whisper (Radford et al. 2022), whose decoder attends to the states themselves."""
    return _whisper(reader, text, None)


def _whisper(reader: ConfigReader, text: DecoderSpec, projector: MergerSpec | None) -> AudioSpec:
    """Read Whisper's encoder (Radford et al. 2022)."""
    for key in ("encoder_layerdrop", "layerdrop"):
        reader.ignore(key)
    positions = reader.count("max_source_positions", 1500, limit=_MAX_FRAMES)
    base = _transformer(reader, text, projector)
    convolutions = FrameConvSpec(positions)
    return replace(base, convolutions=convolutions, window=positions)


def _transformer(
    reader: ConfigReader, text: DecoderSpec, projector: MergerSpec | None
) -> AudioSpec:
    """Read what all encoders have in common, under either of two names."""
    for key in ("dropout", "activation_dropout", "init_std"):
        reader.ignore(key)
    reader.require("scale_embedding", False)
    hidden = _either(reader, "d_model", "hidden_size", 1280)
    heads = "encoder_attention_heads" if "encoder_attention_heads" in reader else ""
    num_heads = read_num_heads(reader, heads or "num_attention_heads", hidden, 20)
    reader.require("num_key_value_heads", num_heads)
    reader.require("head_dim", hidden // num_heads)
    num_mels = reader.count("num_mel_bins", 128, limit=_MAX_MELS)
    return AudioSpec(
        hidden_size=hidden,
        intermediate_size=_either(reader, "encoder_ffn_dim", "intermediate_size", 5120),
        num_heads=num_heads,
        num_layers=_either(reader, "encoder_layers", "num_hidden_layers", 32, limit=MAX_LAYERS),
        out_size=text.hidden_size,
        mel=MelSpec(num_mels),
        convolutions=FrameConvSpec(1),  # replaced by the family, as is the window
        projector=projector,
        window=1,
        norm=VisionNorm("layer", _EPS),
        activation=read_activation(reader, "activation_function", "gelu"),
    )


def _either(
    reader: ConfigReader, name: str, other: str, default: int, limit: int = _MAX_FRAMES
) -> int:
    """Read a count that exporters call by one of two names."""
    return reader.count(name if name in reader else other, default, limit=limit)


def _one_chunk(token_id: int, spec: AudioSpec) -> AudioRules:
    """Count what is heard of one chunk of Whisper's encoder, which is all that the model hears."""
    assert isinstance(spec.convolutions, FrameConvSpec)
    return AudioRules(
        token_id=token_id,
        sampling_rate=spec.mel.sampling_rate,
        hop=spec.mel.hop,
        counts_partial_frame=True,
        pool=spec.pool,
        transcription=TranscriptionRules(
            instruction=_TRANSCRIBE.format(""),
            language_instruction=_TRANSCRIBE.format(" in {name}"),
            translation=_TRANSLATE,
        ),
        model_max_samples=spec.convolutions.chunk_frames * spec.mel.hop,
    )


def _one_source(token_id: int, spec: AudioSpec) -> AudioRules:
    """Count the places of a source: one chunk of the encoder, with the silence at its end."""
    assert isinstance(spec.convolutions, FrameConvSpec)
    chunk = spec.convolutions.chunk_frames * spec.mel.hop
    return AudioRules(
        token_id=token_id,
        sampling_rate=spec.mel.sampling_rate,
        hop=spec.mel.hop,
        pad_samples=chunk,
        alignment=PLACES_ALIGNMENT,
        model_max_samples=chunk,
    )


def _whole_chunks(token_id: int, spec: AudioSpec) -> AudioRules:
    """Count whole chunks of Whisper's encoder, with the silence at the end."""
    assert isinstance(spec.convolutions, FrameConvSpec)
    return AudioRules(
        token_id=token_id,
        sampling_rate=spec.mel.sampling_rate,
        hop=spec.mel.hop,
        pad_samples=spec.convolutions.chunk_frames * spec.mel.hop,
        pool=spec.joined,
        transcription=TranscriptionRules(
            suffix="[TRANSCRIBE]",
            language_suffix="lang:{code}[TRANSCRIBE]",
            translation=_TRANSLATE,
        ),
    )


def _seconds(token_id: int, spec: AudioSpec) -> AudioRules:
    """Count chunks of a second, and what there is of the last one."""
    assert isinstance(spec.convolutions, PlaneConvSpec)
    return AudioRules(
        token_id=token_id,
        sampling_rate=spec.mel.sampling_rate,
        hop=spec.mel.hop,
        min_samples=spec.mel.sampling_rate // 2,
        chunk_frames=spec.convolutions.chunk_frames,
        num_halvings=3,
        transcription=TranscriptionRules(
            language_suffix="language {name}<asr_text>",
            needs_name=True,
            takes_prompt=True,
            marker="<asr_text>",
        ),
        model_max_samples=20 * 60 * spec.mel.sampling_rate,
    )


FAMILIES = {
    "qwen2_audio": AudioFamily(
        qwen2_audio, _one_chunk, ("audio_token_index", "audio_token_id"), 151_646
    ),
    "qwen3_asr": AudioFamily(qwen3_asr, _seconds, ("audio_token_id",), 151_676),
    "voxtral": AudioFamily(voxtral, _whole_chunks, ("audio_token_id",), 24),
    "whisper": AudioFamily(whisper, _one_source, ("decoder_start_token_id",), 50_257, is_flat=True),
}

"""Read a model's audio encoder from the files of its directory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from engine.audio.types import AudioRules
from engine.models.audio.families import FAMILIES
from engine.models.audio.spec import AudioSpec, FrameConvSpec, PlaneConvSpec
from engine.models.audio.speech_tokens import with_speech_tokens
from engine.models.config_reader import ConfigReader
from engine.models.json_file import parse_object, read_bytes
from engine.models.spec import DecoderSpec

# Names of code and of its outputs, what follows from other keys, and lengths that apply to batches.
_WITHOUT_EFFECT = (
    *("feature_extractor_type", "processor_class", "return_attention_mask", "padding_side"),
    *("n_samples", "nb_max_frames", "do_normalize_audio"),
    "mel_filters",  # older exports write down what follows from other keys
)


@dataclass(frozen=True)
class AudioConfig:
    """How a model hears, and which token represents what it hears."""

    spec: AudioSpec
    rules: AudioRules


def read_audio(config: dict[str, Any], directory: Path, text: DecoderSpec) -> AudioConfig | None:
    """Read a model directory's audio part.

    Args:
        config: its parsed config.json.
        directory: its path; the processor's files are read if they exist.
        text: the text model.

    Returns:
        None if the config has no audio part, or one of an unsupported family.

    Raises:
        ModelLoadError: the audio part or a processor's file cannot be served; a one-line reason.
            The text model can still be served.
    """
    family = FAMILIES.get(text.architecture)
    whole = ConfigReader(config)
    if family is None:
        return None
    reader = whole if family.is_flat else whole.section("audio_config")
    if reader is None:
        return None
    for key in ("dtype", "torch_dtype", "model_type"):
        reader.ignore(key)
    spec = replace(family.read(whole, reader, text), architecture=text.architecture)
    if not family.is_flat:
        reader.finish()
    if spec.out_size != text.hidden_size:
        problem = f"makes embeddings of {spec.out_size} dimensions, the text model reads "
        raise whole.error("audio_config", f"{problem}{text.hidden_size}")
    key = next((key for key in family.token_keys if key in whole), family.token_keys[0])
    token_id = whole.non_negative(key, family.token_id)
    if token_id >= text.vocab_size:
        raise whole.error(key, "is beyond the vocabulary")
    rules = _check_features(directory, spec, family.rules(token_id, spec))
    if text.source is not None:
        rules = with_speech_tokens(rules, config, directory, text)
    return AudioConfig(spec, rules)


def _check_features(directory: Path, spec: AudioSpec, rules: AudioRules) -> AudioRules:
    """Check that the feature extractor is the one that is implemented; return its rules."""
    reader = _find(directory)
    if reader is None:
        return rules
    for key in _WITHOUT_EFFECT:
        reader.ignore(key)
    mel = spec.mel
    reader.require("feature_size", mel.num_mels)
    reader.require("sampling_rate", mel.sampling_rate)
    reader.require("hop_length", mel.hop)
    reader.require("n_fft", mel.window)
    reader.require("padding_value", 0.0)
    reader.require("dither", 0.0)
    reader.require("do_normalize", False)
    if isinstance(spec.convolutions, FrameConvSpec):
        seconds = spec.convolutions.chunk_frames * mel.hop // mel.sampling_rate
        reader.require("chunk_length", seconds)
    else:
        assert isinstance(spec.convolutions, PlaneConvSpec)
        reader.ignore("chunk_length")  # of batches that are filled up to one length
        reader.require("n_window", spec.convolutions.chunk_frames // 2)
        shortest = reader.non_negative("min_length", rules.min_samples)
        rules = msgspec.structs.replace(rules, min_samples=shortest)
    reader.finish()
    return rules


def _find(directory: Path) -> ConfigReader | None:
    """Find the audio settings; the newer file takes precedence, as in transformers."""
    path = directory / "processor_config.json"
    if path.is_file():
        whole = ConfigReader(parse_object(path, read_bytes(path)), str(path))
        section = whole.section("feature_extractor")
        if section is not None:
            return section
    path = directory / "preprocessor_config.json"
    if path.is_file():
        return ConfigReader(parse_object(path, read_bytes(path)), str(path))
    return None

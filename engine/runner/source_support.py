"""Refuse what encoder-decoder models do not support, before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.models.checkpoint import ModelConfig
from engine.models.spec import DecoderSpec


def check_source_support(config: EngineConfig, model: ModelConfig) -> None:
    """Check that an encoder-decoder model can be served as ``config`` asks.

    Raises:
        ModelLoadError: it cannot; one line that names the setting and the model.
    """
    spec = model.spec
    if not isinstance(spec, DecoderSpec) or spec.source is None:
        return
    if not spec.is_generative:
        raise ModelLoadError(f"{spec.architecture} without its head makes no transcripts")
    if model.audio is None:  # nothing else can be a source
        raise ModelLoadError(model.audio_unsupported_reason or f"{spec.architecture}: no encoder")
    for setting in _unsupported(config):
        raise ModelLoadError(f"{setting}: {spec.architecture} models do not support it here")


def check_source_room(spec: DecoderSpec, max_model_len: int) -> None:
    """Check that a sequence has room behind its source. Raises ModelLoadError: it has none."""
    if spec.source is not None and max_model_len <= spec.source.num_places:
        raise ModelLoadError(
            f"a context of {max_model_len} tokens, as configured or as fits the KV cache, is too "
            f"short for {spec.architecture}: audio takes {spec.source.num_places}"
        )


def _unsupported(config: EngineConfig) -> Iterator[str]:
    if config.speculation is not None:
        yield f"speculation {config.speculation.method!r}"
    if config.num_ranks > 1:
        yield f"{config.num_ranks} ranks"
    if not config.max_audio_clips:
        yield "max_audio_clips 0"

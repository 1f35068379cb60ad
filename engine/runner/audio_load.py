"""Audio decisions that precede loading weights, and loading the audio encoder."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec
import torch

from engine.audio.types import AudioRules
from engine.config import EngineConfig
from engine.models.audio.config import AudioConfig
from engine.models.audio.encoder import AudioEncoder, load_audio_encoder
from engine.models.audio.weights import is_own
from engine.models.checkpoint import ModelConfig
from engine.models.spec import DecoderSpec
from engine.models.vision.tower import tower_unsupported_reason
from engine.runner.media_encoders import ClipEncoder
from engine.runner.weight_files import WeightFiles

logger = logging.getLogger(__name__)

# Lower bound of tokens whose embeddings are cached: enough for several clips of usual length.
_MIN_CACHED_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class AudioPlan:
    """How a model takes audio."""

    audio: AudioConfig
    rules: AudioRules
    max_tokens: int  # of a clip

    @property
    def num_cached_cells(self) -> int:
        """Tokens whose embeddings are cached at once."""
        return max(_MIN_CACHED_TOKENS, self.max_tokens)

    def load(self, files: WeightFiles, dtype: torch.dtype, device: torch.device) -> AudioEncoder:
        """Load the audio encoder. Raises ModelLoadError."""
        return load_audio_encoder(self.audio, files.headers, dtype, device, files.seed)

    def num_bytes(self, spec: DecoderSpec, encoder: AudioEncoder, dtype: torch.dtype) -> int:
        """The memory that reading audio takes besides the encoder's weights."""
        kept = self.num_cached_cells * spec.hidden_size * dtype.itemsize
        return kept + encoder.activation_bytes(self.max_tokens)

    def encoder(self, encoder: AudioEncoder, device: torch.device) -> ClipEncoder:
        """Make the runner's audio reader."""
        return ClipEncoder(encoder, device)


def plan_audio(
    config: EngineConfig, model: ModelConfig, files: WeightFiles, spec: DecoderSpec
) -> AudioPlan | None:
    """Decide how the model takes audio; None if it takes none, with the reason logged."""
    if not config.max_audio_clips or not spec.is_generative:
        return None
    audio, reason = model.audio, model.audio_unsupported_reason
    if audio is not None and files.seed is None:
        reason = tower_unsupported_reason(files.headers, is_own)
    if reason is not None:
        logger.info("audio is not taken: %s", reason)
    if audio is None or reason is not None:
        return None
    rules = msgspec.structs.replace(
        audio.rules,
        max_clips=config.max_audio_clips,
        max_samples=config.max_audio_s * audio.rules.sampling_rate,
    )
    return AudioPlan(audio, rules, rules.max_tokens(config.max_model_len or spec.max_context_len))

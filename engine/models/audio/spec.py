"""An audio encoder as data, without its weights. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.vision.spec import MergerSpec, VisionActivation, VisionNorm


@dataclass(frozen=True)
class MelSpec:
    """A log-mel spectrogram (Whisper's, Radford et al. 2022)."""

    num_mels: int
    sampling_rate: int = 16_000  # Hz
    window: int = 400  # samples of a Fourier transform
    hop: int = 160  # samples from one frame to the next


@dataclass(frozen=True)
class FrameConvSpec:
    """Two convolutions over frames, the second of stride 2 (Whisper). Positions are learned."""

    num_positions: int  # of a chunk's states

    @property
    def chunk_frames(self) -> int:
        """Frames of a chunk, to which the last is filled up with silence."""
        return 2 * self.num_positions

    @property
    def num_states(self) -> int:
        """States of a chunk."""
        return self.num_positions


@dataclass(frozen=True)
class PlaneConvSpec:
    """Three convolutions of stride 2 over frames and mels (Qwen3-Omni). Positions are sinusoids,
    counted from the start of a chunk."""

    chunk_frames: int
    channels: int

    @property
    def num_states(self) -> int:
        """States of a chunk."""
        frames = self.chunk_frames
        for _ in range(3):
            frames = (frames + 1) // 2
        return frames


@dataclass(frozen=True)
class AudioSpec:
    """An audio transformer and its connection to a text model."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    out_size: int  # of the text model's embeddings
    mel: MelSpec
    convolutions: FrameConvSpec | PlaneConvSpec
    projector: MergerSpec | None  # None: the last norm's output is read as it is
    norm: VisionNorm
    activation: VisionActivation
    window: int  # states that attend to each other; whole chunks of the convolutions
    architecture: str = ""  # Hugging Face model_type of the whole model
    key_bias: bool = False  # otherwise queries and values have biases, keys have none
    pool: int = 1  # states that are averaged before the last norm (Qwen2-Audio)
    joined: int = 1  # states that are concatenated before the projector (Voxtral)

    # Of layers as vision encoders have them:
    @property
    def gated(self) -> bool:
        """Whether the MLP is gated."""
        return False

    @property
    def qk_norm(self) -> None:
        """The norm of queries and keys."""
        return None

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def merged_size(self) -> int:
        """Width of the projector's input."""
        return self.hidden_size * self.joined

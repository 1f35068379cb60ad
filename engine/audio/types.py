"""Data types of audio; see ``engine/types.py``."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from engine.audio.transcription import TranscriptionRules

BYTES_PER_SAMPLE = 4  # float32


class AudioRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a model takes audio: its length in samples, and the number of tokens for it.

        samples ─► frames of the spectrogram ─► halved by convolutions ─► joined or averaged: tokens

    A chat template writes ``token_id`` once for each clip; the model's prompt has one for each
    embedding.
    """

    token_id: int
    sampling_rate: int  # Hz
    hop: int  # samples from one frame to the next
    min_samples: int = 0  # a shorter clip is filled up with silence
    pad_samples: int = 1  # silence fills a clip up to a multiple of this
    counts_partial_frame: bool = False  # a rest of less than a hop is a frame
    chunk_frames: int | None = None  # convolutions see these alone; None: the whole clip
    num_halvings: int = 1  # convolutions of stride 2
    pool: int = 1  # states that become one token; a rest is dropped
    alignment: int = 1  # tokens are filled up to a multiple of this, with ones of nothing
    model_max_samples: int | None = None  # the most that the model hears; None: no limit of its own
    max_samples: int = 2**31  # of a clip
    max_clips: int = 16  # per prompt
    transcription: TranscriptionRules = TranscriptionRules()

    def num_tokens(self, num_samples: int) -> int:
        """Return the number of tokens of a clip; 0: it is too short to be heard."""
        count = self.num_states(num_samples) // self.pool
        return -(-count // self.alignment) * self.alignment

    def num_states(self, num_samples: int) -> int:
        """Return the number of states that the convolutions make of a clip."""
        padded = -(-max(num_samples, self.min_samples) // self.pad_samples) * self.pad_samples
        frames, rest = divmod(padded, self.hop)
        frames += bool(rest) and self.counts_partial_frame
        if self.chunk_frames is None:
            return self._halved(frames)
        chunks, rest = divmod(frames, self.chunk_frames)
        return chunks * self._halved(self.chunk_frames) + self._halved(rest)

    def max_tokens(self, max_model_len: int) -> int:
        """Return the most tokens of a clip in a context of this length."""
        longest = min(self.max_samples, self.model_max_samples or self.max_samples)
        return min(self.num_tokens(longest), max_model_len)

    def _halved(self, frames: int) -> int:
        for _ in range(self.num_halvings):
            frames = (frames + 1) // 2
        return frames


class AudioClip(msgspec.Struct, frozen=True, kw_only=True):
    """A clip in a prompt, at the model's sampling rate. Crosses the process boundary."""

    start: int  # index of its first token in the prompt
    num_tokens: int  # from there on
    samples: bytes  # float32, mono, within -1 and 1 as files have them
    digest: bytes  # of the samples

    def __repr__(self) -> str:  # without the samples, as requests may be logged
        number = len(self.samples) // BYTES_PER_SAMPLE
        return f"AudioClip({number} samples, {self.num_tokens} tokens from {self.start})"


@dataclass(frozen=True)
class ProcessedAudio:
    """A clip as a model hears it."""

    samples: bytes  # float32, mono, at the model's sampling rate
    digest: bytes  # of the samples
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        """The size of the samples."""
        return len(self.samples)

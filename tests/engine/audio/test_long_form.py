"""Recordings of any length: windows, and where the next one begins."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
import torch

from engine.audio.long_form import LongForm, of_any_length
from engine.audio.speech import SpeechTokens
from engine.audio.transcription import TranscriptionRules
from engine.audio.types import AudioRules, ProcessedAudio

RATE, ZERO, STEPS = 16_000, 200, 50
TOKENS = SpeechTokens(start=150, no_timestamps=ZERO - 1, text_end=149, max_text=96)
RULES = AudioRules(
    token_id=150,
    sampling_rate=RATE,
    hop=160,
    pad_samples=RATE,
    alignment=64,
    model_max_samples=RATE,
    transcription=TranscriptionRules(speech=TOKENS),
)


def sound(samples: np.ndarray) -> ProcessedAudio:
    data = samples.astype("<f4").tobytes()
    return ProcessedAudio(data, hashlib.blake2b(data).digest(), 64)


def long_form(seconds: float, *, has_timestamps: bool = True) -> LongForm:
    return LongForm(sound(np.ones(round(seconds * RATE))), RULES, has_timestamps=has_timestamps)


def test_segments_and_the_next_window_are_hugging_faces() -> None:
    from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

    rng = random.Random(5)
    for _ in range(100):
        length = rng.randrange(1, 12)
        ids = [rng.choice((5, 6, ZERO + rng.randrange(STEPS))) for _ in range(length)]
        speech = long_form(9)
        first = speech.next()
        assert first is not None
        assert (first.start_s, first.duration_s) == (0.0, 1.0)
        found = speech.take(ids)
        segments, frames = WhisperGenerationMixin._retrieve_segment(
            seek_sequence=torch.tensor(ids),
            seek_outputs=[ids],
            time_offset=torch.zeros(1, dtype=torch.float64),
            timestamp_begin=ZERO,
            seek_num_frames=torch.tensor([2 * STEPS]),
            time_precision=0.02,
            time_precision_features=0.01,
            input_stride=2,
            prev_idx=0,
            idx=0,
            return_token_timestamps=False,
            decoder_input_ids=torch.zeros(1, 0),
        )
        if any(int(each["tokens"][0]) < ZERO for each in segments[:-1]):
            continue  # does not begin with a timestamp, which the rules exclude
        window = speech.next()
        assert window is not None
        seconds = int(frames) / 100
        # Where Hugging Face would hear the same again for ever, the next window is heard.
        assert window.start_s == pytest.approx(seconds if seconds > 0 else 1.0)
        for one, other in zip(found, segments, strict=True):
            whole = other["tokens"].tolist()
            assert whole[: len(one.token_ids)] == list(one.token_ids)
            if len(found) > 1:
                assert one.start_s == pytest.approx(float(other["start"]))
            assert one.end_s == pytest.approx(float(other["end"]))


def test_windows_follow_the_last_whole_segment() -> None:
    speech = long_form(2.5)
    assert speech.duration_s == 2.5
    assert speech.next() is not None
    stamp = ZERO + 30
    segments = speech.take([ZERO, 5, stamp, stamp, 6, 7])  # the second one has no end
    assert [(each.start_s, each.end_s, each.token_ids) for each in segments] == [
        (0.0, 0.6, (ZERO, 5, stamp))
    ]
    second = speech.next()
    assert second is not None
    assert (second.start_s, second.duration_s) == (0.6, 1.0)
    assert len(second.clip.samples) == 4 * RATE
    assert speech.take([])[0].end_s == 1.6  # nothing was said
    third = speech.next()
    assert third is not None
    assert (third.start_s, third.duration_s) == (1.6, 0.9)
    (last,) = speech.take([ZERO, 5, ZERO + 20])
    assert (last.start_s, last.end_s) == (1.6, 2.0)
    assert speech.next() is None


def test_without_timestamps_windows_are_cut_where_it_is_quiet() -> None:
    samples = np.random.default_rng(0).normal(0, 0.3, round(2.6 * RATE))
    quiet = round(0.925 * RATE)
    samples[quiet - 800 : quiet + 800] = 0.0
    speech = LongForm(sound(samples), RULES, has_timestamps=False)
    starts, total = [], 0
    while (window := speech.next()) is not None:
        starts.append(window.start_s)
        total += len(window.clip.samples)
        assert window.duration_s <= 1.0
        speech.take([5, 6])
    assert total == samples.size * 4
    assert starts[1] == pytest.approx(0.925, abs=0.03)
    assert len(starts) in (3, 4)


def test_any_length_is_read() -> None:
    assert of_any_length(RULES).num_tokens(9 * RATE) > 0
    assert of_any_length(RULES).model_max_samples is None

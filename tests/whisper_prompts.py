"""Transcription requests for tiny Whisper models (``tests/tiny_whisper.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.audio.read import process_audio
from engine.audio.speech import SpeechTokens
from engine.audio.types import AudioClip, AudioRules
from engine.types import Request, SamplingParams
from tests.audio_prompts import audio_rules_of
from tests.tiny_whisper import RATE


def rules_of(directory: Path) -> tuple[AudioRules, SpeechTokens]:
    """The rules of the model in a directory."""
    rules = audio_rules_of(directory)
    tokens = rules.transcription.speech
    assert tokens is not None
    return rules, tokens


def transcribe(
    name: str,
    directory: Path,
    samples: np.ndarray,
    prompt: Sequence[int],
    *,
    stamped: bool = False,
    max_tokens: int = 24,
    **sampling: object,
) -> Request:
    """A request for a greedy transcript of a clip behind these tokens."""
    rules, tokens = rules_of(directory)
    heard = process_audio(samples, RATE, rules)
    params = SamplingParams(
        **{
            **{"temperature": 0.0, "max_tokens": max_tokens},
            **{"speech": tokens.rules(has_timestamps=stamped), **sampling},
        }
    )
    return Request(
        id=name,
        prompt_token_ids=(*[rules.token_id] * heard.num_tokens, *prompt),
        audio=(
            AudioClip(
                start=0, num_tokens=heard.num_tokens, samples=heard.samples, digest=heard.digest
            ),
        ),
        sampling=params,
    )

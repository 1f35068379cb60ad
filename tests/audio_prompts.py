"""Prompts with audio, for tiny models (``tests/tiny_audio.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.audio.placeholders import expand_audio_tokens
from engine.audio.read import process_audio
from engine.audio.types import AudioRules
from engine.models.checkpoint import read_config
from engine.types import Request, SamplingParams
from tests.tiny_audio import RATE, speech

SECONDS = (1.0, 0.32)


def audio_rules_of(directory: Path) -> AudioRules:
    """The audio rules of the model in a directory."""
    audio = read_config(str(directory)).audio
    assert audio is not None
    return audio.rules


def ask_about(
    name: str,
    rules: AudioRules,
    seed: int = 0,
    sampling: SamplingParams | None = None,
    seconds: Sequence[float] = SECONDS,
) -> Request:
    """A request with clips of these lengths and text between them. They depend on the seed."""
    sounds, template = [], [3, 7]
    for number, length in enumerate(seconds):
        sounds.append(process_audio(speech(length, 10 * seed + number), RATE, rules))
        template += [rules.token_id, 11 + number, 5]
    ids, clips = expand_audio_tokens(template, sounds, rules)
    return Request(
        id=name,
        prompt_token_ids=tuple(ids),
        audio=clips,
        sampling=sampling or SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
    )

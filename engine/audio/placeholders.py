"""Expand a template's audio token into the tokens of a clip."""

from __future__ import annotations

from collections.abc import Sequence

from engine.audio.types import AudioClip, AudioRules, ProcessedAudio
from engine.errors import InvalidParameter


def expand_audio_tokens(
    token_ids: Sequence[int], sounds: Sequence[ProcessedAudio], rules: AudioRules
) -> tuple[list[int], tuple[AudioClip, ...]]:
    """Return the prompt for the model, and the clips in it.

    Args:
        token_ids: from a chat template, with one ``rules.token_id`` for each clip.
        sounds: in prompt order.
        rules: of the model.

    Raises:
        InvalidParameter: the template has a different number of clips.
    """
    num_shown = sum(id_ == rules.token_id for id_ in token_ids)
    if num_shown != len(sounds):
        problem = f"the chat template shows {num_shown} audio clips of {len(sounds)}"
        raise InvalidParameter(problem, param="messages")
    remaining = iter(sounds)
    placed: list[int] = []
    clips: list[AudioClip] = []
    for id_ in token_ids:
        if id_ != rules.token_id:
            placed.append(id_)
            continue
        sound = next(remaining)
        clips.append(
            AudioClip(
                start=len(placed),
                num_tokens=sound.num_tokens,
                samples=sound.samples,
                digest=sound.digest,
            )
        )
        placed += [rules.token_id] * sound.num_tokens
    return placed, tuple(clips)

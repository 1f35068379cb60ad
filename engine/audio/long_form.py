"""Speech of any length, heard one window after the other (Radford et al. 2022, section 3.8).

    speech = LongForm(sound, rules, has_timestamps=True)
    while (window := speech.next()) is not None:
        segments = speech.take(transcribe(window.clip))

With timestamps, the next window begins where the last whole segment ended. Without, windows are cut
at the quietest place of their last sixth. Each window is heard by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from engine.audio.speech import SECONDS_PER_STEP
from engine.audio.types import BYTES_PER_SAMPLE, AudioClip, AudioRules, ProcessedAudio

_SEARCHED = 6  # the part of a window in which it may be cut, as a divisor
_STRETCHES_PER_S = 20  # whose loudness is compared


def of_any_length(rules: AudioRules) -> AudioRules:
    """Return rules by which a recording is read that is longer than one window."""
    return msgspec.structs.replace(rules, model_max_samples=None)


class Segment(NamedTuple):
    """A stretch of speech and what is said there."""

    start_s: float  # from the beginning of the whole
    end_s: float
    token_ids: tuple[int, ...]  # as generated, with the timestamps at both ends
    window_start_s: float


class Window(NamedTuple):
    """What is heard at once."""

    clip: AudioClip  # at the beginning of a prompt
    start_s: float
    duration_s: float


class LongForm:
    """The windows of a recording.

    Args:
        sound: the recording.
        rules: of a model that only transcribes.
        has_timestamps: whether transcripts have timestamps.
    """

    def __init__(self, sound: ProcessedAudio, rules: AudioRules, *, has_timestamps: bool) -> None:
        tokens = rules.transcription.speech
        assert tokens is not None
        self._samples = sound.samples
        self._total = len(sound.samples) // BYTES_PER_SAMPLE
        self._rules = rules
        self._has_timestamps = has_timestamps
        self._zero = tokens.no_timestamps + 1  # the timestamp of 0 s
        self._step = round(SECONDS_PER_STEP * rules.sampling_rate)  # samples
        self._at = 0  # sample at which the next window begins
        self._length = 0  # of the last window, in samples

    @property
    def duration_s(self) -> float:
        """Of the whole recording."""
        return self._total / self._rules.sampling_rate

    def next(self) -> Window | None:
        """Return the next window; None: everything has been heard."""
        left = self._total - self._at
        if left <= 0 or (self._at and left < self._step):
            return None
        most = self._rules.pad_samples
        self._length = min(left, most)
        if left > most and not self._has_timestamps:
            self._length = self._quietest(most)
        begin, end = self._at * BYTES_PER_SAMPLE, (self._at + self._length) * BYTES_PER_SAMPLE
        heard = self._samples[begin:end]
        clip = AudioClip(
            start=0,
            num_tokens=self._rules.num_tokens(self._length),
            samples=heard,
            digest=hashlib.blake2b(heard, digest_size=32).digest(),
        )
        rate = self._rules.sampling_rate
        return Window(clip, self._at / rate, self._length / rate)

    def take(self, output_ids: Sequence[int]) -> list[Segment]:
        """Take the transcript of the last window, without the token that ended it.

        Returns its segments. With timestamps, what follows the end of the last whole segment is
        heard again in the next window, unless the window ends with it.
        """
        begin, length = self._at, self._length
        cuts = self._cuts(output_ids) if self._has_timestamps else []
        if not cuts:
            self._at += length
            return [self._segment(output_ids, begin, 0, self._last_stamp(output_ids))]
        found, first = [], 0
        for cut in cuts:
            ids = output_ids[first:cut]
            found.append(self._segment(ids, begin, self._steps(ids[0]), self._steps(ids[-1])))
            first = cut
        heard = self._steps(output_ids[cuts[-1] - 1]) * self._step
        is_whole = cuts[-1] == len(output_ids) and output_ids[-2] < self._zero
        self._at += length if is_whole or not 0 < heard <= length else heard
        return found

    def _segment(self, ids: Sequence[int], begin: int, first: int, last: int) -> Segment:
        start_s = begin / self._rules.sampling_rate

        def at(steps: int) -> float:  # silence behind the end is heard, too
            return round(min(start_s + steps * SECONDS_PER_STEP, self.duration_s), 3)

        return Segment(at(first), at(last), tuple(ids), start_s)

    def _cuts(self, ids: Sequence[int]) -> list[int]:
        """Return where whole segments end: between two timestamps, and after a single last one."""
        is_stamp = [token >= self._zero for token in ids]
        cuts = [i + 1 for i in range(len(ids) - 1) if is_stamp[i] and is_stamp[i + 1]]
        if cuts and is_stamp[-2:] == [False, True]:
            cuts.append(len(ids))
        return cuts

    def _last_stamp(self, ids: Sequence[int]) -> int:
        """Return the last timestamp in steps; without any, the window's end."""
        stamps = [token for token in ids if token >= self._zero] if self._has_timestamps else []
        if not stamps or stamps[-1] == self._zero:
            return self._length // self._step
        return self._steps(stamps[-1])

    def _steps(self, stamp: int) -> int:
        return max(0, stamp - self._zero)

    def _quietest(self, most: int) -> int:
        """Return the length at which to cut a window of at most ``most`` samples."""
        import numpy as np  # not at the top: most speech is short

        stretch = max(1, self._rules.sampling_rate // _STRETCHES_PER_S)
        searched = max(1, most // _SEARCHED // stretch)
        first = self._at + most - searched * stretch
        samples = np.frombuffer(
            self._samples,
            np.float32,
            searched * stretch,
            first * BYTES_PER_SAMPLE,
        )
        loudness = np.square(samples.reshape(searched, stretch)).sum(axis=1)
        chosen = searched - 1 - int(loudness[::-1].argmin())  # the last one of equal ones
        return first - self._at + chosen * stretch + stretch // 2

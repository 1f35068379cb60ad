"""The shapes of transcripts: JSON, events, and with times verbose JSON, SubRip and WebVTT."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct


class DurationUsage(Struct, tag_field="type", tag="duration"):
    """The length of what was heard, by a model that only transcribes."""

    seconds: int  # begun ones count


class InputTokenDetails(Struct):
    """What the prompt is made of."""

    text_tokens: int
    audio_tokens: int


class TokenUsage(Struct, tag_field="type", tag="tokens"):
    """Tokens read and generated, of a model that answers in chats."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputTokenDetails


class Transcription(Struct):
    """The text of the speech."""

    text: str
    usage: TokenUsage | DurationUsage


class TranscriptDelta(Struct, tag_field="type", tag="transcript.text.delta"):
    """The next piece of the text."""

    delta: str


class TranscriptDone(Struct, tag_field="type", tag="transcript.text.done"):
    """The whole text, at the end of a stream."""

    text: str
    usage: TokenUsage | DurationUsage


class TranscriptSegment(Struct, kw_only=True):
    """A stretch of speech."""

    id: int
    seek: int  # the beginning of the window in which it was heard, in hundredths of a second
    start: float  # seconds
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float  # of its window's tokens
    compression_ratio: float  # of its window's text; high where a text repeats itself
    no_speech_prob: float  # of its window


class VerboseTranscription(Struct, kw_only=True):
    """A transcript with times."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float  # seconds
    text: str
    segments: list[TranscriptSegment]
    usage: DurationUsage


def compression_ratio(text: str) -> float:
    """Return how many bytes of a text become one when it is compressed."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def to_srt(segments: Sequence[TranscriptSegment]) -> str:
    """Return the segments as SubRip subtitles."""
    parts = [
        f"{number}\n{_clock(each.start, ',')} --> {_clock(each.end, ',')}\n{_line(each)}\n"
        for number, each in enumerate(segments, 1)
    ]
    return "\n".join(parts)


def to_vtt(segments: Sequence[TranscriptSegment]) -> str:
    """Return the segments as WebVTT subtitles."""
    parts = [
        f"{_clock(each.start, '.')} --> {_clock(each.end, '.')}\n{_line(each)}\n"
        for each in segments
    ]
    return "\n".join(("WEBVTT\n", *parts))


def _line(segment: TranscriptSegment) -> str:
    """Return a segment's text on one line that holds no arrow, as both formats demand."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    whole, ms = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}{point}{ms:03}"
